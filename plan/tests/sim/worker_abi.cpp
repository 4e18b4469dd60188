// A C interface, for ctypes, to a Worker that is compiled from a changed source (test_moving_windows.py).
#include <netfold/protocol/worker.hpp>

#include <cstring>

using namespace netfold::protocol;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

namespace {
Worker& of(void* self) { return *static_cast<Worker*>(self); }
}  // namespace

extern "C" {
void* worker_new(u32 job, u32 epoch, u32 incarnation, u32 worker, u32 workers, u32 window, u32 payload_bytes) {
  return new Worker({job, epoch, incarnation, static_cast<std::uint16_t>(worker), static_cast<std::uint16_t>(workers),
                     window, payload_bytes});
}
void worker_delete(void* self) { delete static_cast<Worker*>(self); }
int worker_can_start(void* self) { return of(self).can_start(); }
void worker_start(void* self, u32 operation, u64 elements, int wire, int reduce, int table) {
  of(self).start({operation, elements, static_cast<netfold::kernels::DType>(wire),
                  static_cast<netfold::kernels::ReduceOp>(reduce), static_cast<std::uint16_t>(table)});
}
// Returns 0: nothing to send; 1: a first send; 2: a retransmission.
int worker_poll_send(void* self, std::int64_t now_ns, std::byte* header, u64* first, std::uint16_t* count) {
  const auto send = of(self).poll_send(now_ns);
  if (!send) return 0;
  write_header(send->header, header);
  *first = send->first;
  *count = send->count;
  return send->again ? 2 : 1;
}
void worker_not_sent(void* self, u64 chunk) { of(self).not_sent(chunk); }
// `values`: room for the values of one packet.
int worker_handle_packet(void* self, const std::byte* data, u64 bytes, std::int64_t now_ns, int* drop, u64* first,
                         int* finished, u64* value_bytes, std::byte* values) {
  const auto received = of(self).handle_packet({data, bytes}, now_ns);
  *drop = static_cast<int>(received.drop);
  *first = received.first;
  *finished = received.finished;
  *value_bytes = received.values.size();
  if (!received.values.empty()) std::memcpy(values, received.values.data(), received.values.size());
  return static_cast<int>(received.outcome);
}
std::int64_t worker_next_send_ns(void* self) { return of(self).next_send_ns(); }
std::int64_t worker_poll_timeout(void* self) { return of(self).poll_timeout(); }
void worker_handle_timeout(void* self, std::int64_t now_ns) { of(self).handle_timeout(now_ns); }
int worker_idle(void* self) { return of(self).idle(); }
u32 worker_in_flight(void* self) { return of(self).in_flight(); }
u32 worker_sendable(void* self) { return of(self).sendable(); }
u32 worker_probe_results(void* self) { return of(self).probe_results(); }
u32 worker_congestion_window(void* self) { return of(self).congestion_window(); }
u64 worker_oldest_outstanding(void* self) { return of(self).oldest_outstanding(); }
u64 worker_retransmissions(void* self) { return of(self).retransmissions(); }
}
