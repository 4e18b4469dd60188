// Worker::handle_packet, and all else that may happen to a worker, in whatever order.
#include <netfold/kernels/reduce.hpp>
#include <netfold/protocol/worker.hpp>

#include <set>

#include "machine_input.hpp"

using namespace netfold::protocol;
using netfold::fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace fuzz = netfold::fuzz;
  namespace kernels = netfold::kernels;
  constexpr std::uint32_t kWindow = 3;
  fuzz::Input input({reinterpret_cast<const std::byte*>(data), size});
  Worker machine({.job = fuzz::kJob,
                  .epoch = fuzz::kEpoch,
                  .incarnation = fuzz::kIncarnation,
                  .worker = 1,
                  .workers = 3,
                  .window = kWindow,
                  .payload_bytes = fuzz::kPayloadBytes});
  std::int64_t now_ns = 1;
  std::uint32_t operations = 0;
  std::set<std::uint64_t> sent, received;
  for (int left = 128; left > 0 && !input.empty(); --left) {
    const std::uint8_t event = input.byte();
    now_ns += std::int64_t{1} << (event >> 3);  // up to two seconds
    switch (event % 8) {
      case 0:
        if (machine.can_start()) {
          const auto wire = static_cast<kernels::DType>(input.byte() % kernels::kDTypeCount);
          const auto reduce = static_cast<kernels::ReduceOp>(input.byte() % kernels::kReduceOpCount);
          if (!kernels::is_defined(reduce, wire)) break;
          machine.start({.operation = operations++, .elements = 1u + input.byte() % 32, .wire = wire, .reduce = reduce});
        }
        break;
      case 1:
      case 2:
        if (const auto send = machine.poll_send(now_ns)) {
          expect(send->again == !sent.insert(send->header.chunk).second, "again is said of what was sent before");
          expect(!received.contains(send->header.chunk), "what is answered is not sent again");
          expect(send->header.chunk < machine.oldest_outstanding() + kWindow, "nothing is sent beyond the window");
        }
        break;
      case 3:
        machine.handle_timeout(now_ns);
        break;
      default: {
        const bool any = event % 8 == 4;
        const std::vector<std::byte> packet = any ? input.any_packet() : input.job_packet(kFromSwitch);
        const Worker before = machine;
        const auto got = machine.handle_packet(packet, now_ns);
        expect((got.outcome == Worker::Outcome::dropped) == (got.drop != Drop::none), "a drop has a reason");
        if (got.outcome != Worker::Outcome::received) {
          expect(machine == before, "a machine changes when it receives");
          break;
        }
        expect(sent.contains(got.header.chunk), "only what was sent is answered");
        expect(received.insert(got.header.chunk).second, "a chunk is delivered once");
        const auto wire = static_cast<kernels::DType>(got.header.wire);
        expect(got.values.size() == got.header.count * kernels::element_bytes(wire), "values are as many as it says");
        expect(got.values.data() + got.values.size() <= packet.data() + packet.size(), "values lie in the packet");
      }
    }
    expect(machine.in_flight() + machine.sendable() <= kWindow, "no more than a window is under way");
    expect((machine.poll_timeout() == -1) == (machine.in_flight() == 0), "a timer runs while something is in flight");
  }
  return 0;
}
