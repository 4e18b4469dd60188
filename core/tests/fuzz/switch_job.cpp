// SwitchJob::handle_packet: whatever arrives, in whatever order, changes what its outcome says and nothing else.
#include <netfold/protocol/switch_job.hpp>

#include "machine_input.hpp"

using namespace netfold::protocol;
using netfold::fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace fuzz = netfold::fuzz;
  fuzz::Input input({reinterpret_cast<const std::byte*>(data), size});
  SwitchJob machine({.job = fuzz::kJob,
                     .epoch = fuzz::kEpoch,
                     .incarnation = fuzz::kIncarnation,
                     .workers = 3,
                     .window = 2,
                     .payload_bytes = fuzz::kPayloadBytes});
  // Bounded, so that a long input is no slow one.
  for (int left = 64; left > 0 && !input.empty(); --left) {
    const bool any = input.byte() % 8 == 0;
    const std::vector<std::byte> packet = any ? input.any_packet() : input.job_packet(0);
    const SwitchJob before = machine;
    const auto handled = machine.handle_packet(packet);
    using Outcome = SwitchJob::Outcome;
    expect((handled.outcome == Outcome::dropped) == (handled.drop != Drop::none), "a drop has a reason");
    const bool counted = handled.outcome == Outcome::stored || handled.outcome == Outcome::completed;
    expect(counted != (machine == before), "a machine changes when a packet counts");
    if (handled.outcome == Outcome::dropped) continue;
    expect(handled.slot < machine.slot_count() && handled.worker < 3 && handled.other < 3, "indices are the job's");
    if (counted) {
      const auto was = before.missing(handled.chunk);
      const auto is = machine.missing(handled.chunk);
      expect(is.size() + 1 == was.size(), "a contribution counts once");
      expect(is.empty() == (handled.outcome == Outcome::completed), "a chunk is complete when nobody is missing");
    }
    if (handled.outcome == Outcome::mismatch) {
      std::vector<std::byte> out(machine.packet_bytes());
      machine.write_mismatch(handled.chunk, machine.descriptor(handled.slot), handled.other, 1, out.data());
      expect(PacketView::parse(out)->header().flags == (kFromSwitch | kMismatch), "a mismatch is a packet");
    } else if (handled.outcome != Outcome::stored) {
      const auto answer = PacketView::parse(machine.frame(handled.slot));
      expect(answer && answer->header().chunk == handled.chunk, "an answer is a packet of its chunk");
    }
  }
  return 0;
}
