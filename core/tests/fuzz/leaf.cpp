// A leaf's SwitchJob: whatever arrives from its workers and from its parent changes what its outcome says and nothing
// else.
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
                     .workers = 2,
                     .window = 2,
                     .payload_bytes = fuzz::kPayloadBytes,
                     .parent = ParentLink{fuzz::kJob, fuzz::kEpoch, fuzz::kIncarnation, 1},
                     .names = {4, 9}});
  using Outcome = SwitchJob::Outcome;
  // Bounded, so that a long input is no slow one.
  for (int left = 64; left > 0 && !input.empty(); --left) {
    const std::uint8_t kind = input.byte();
    const bool parent = (kind & 1) != 0;
    const std::uint8_t flags = static_cast<std::uint8_t>(parent ? kFromSwitch | (kind & (kMismatch | kNack)) : 0);
    const std::vector<std::byte> packet = kind % 16 == 15 ? input.any_packet() : input.job_packet(flags);
    const SwitchJob before = machine;
    const auto handled = parent ? machine.handle_parent(packet) : machine.handle_packet(packet);
    expect((handled.outcome == Outcome::dropped) == (handled.drop != Drop::none), "a drop has a reason");
    const bool counted = handled.outcome == Outcome::stored || handled.outcome == Outcome::summed ||
                         handled.outcome == Outcome::completed;
    expect(counted != (machine == before), "a machine changes when a packet counts");
    if (handled.outcome == Outcome::completed) {
      expect(parent && before.summed_count() == machine.summed_count() + 1, "a result is of a sum");
      const auto answer = PacketView::parse(machine.frame(handled.slot));
      expect(answer && answer->header().chunk == handled.chunk, "an answer is a packet of its chunk");
    } else if (handled.outcome == Outcome::summed || handled.outcome == Outcome::resend_sum) {
      const auto sum = PacketView::parse(machine.sum(handled.slot, 1));
      expect(!parent && sum && sum->header().chunk == handled.chunk, "a sum is a packet of its chunk");
      expect(machine.missing(handled.chunk).empty(), "a sum misses nobody");
    } else if (handled.outcome == Outcome::mismatch && parent) {
      std::vector<std::byte> out(machine.packet_bytes());
      const Header header = PacketView::parse(packet)->header();
      machine.write_mismatch(handled.chunk, CallDescriptor::of(header), header.worker, 1, out.data());
      expect(PacketView::parse(out)->header().flags == (kFromSwitch | kMismatch), "a mismatch is a packet");
    }
  }
  return 0;
}
