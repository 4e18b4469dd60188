// Functions that ctypes can call, over an Uplink that is compiled from a changed source (test_parent_sender_search.py).
#include <netfold/protocol/uplink.hpp>

#include <cstring>

using netfold::protocol::Uplink;

namespace {
Uplink& of(void* self) { return *static_cast<Uplink*>(self); }
}  // namespace

extern "C" {
void* uplink_new(std::uint32_t slots) { return new Uplink(slots); }
void* uplink_copy(void* self) { return new Uplink(of(self)); }
void uplink_delete(void* self) { delete static_cast<Uplink*>(self); }
// The bytes' number; written as far as there is room.
std::uint64_t uplink_canonical(void* self, unsigned char* out, std::uint64_t room) {
  std::vector<std::byte> bytes;
  of(self).append_canonical(bytes);
  std::memcpy(out, bytes.data(), bytes.size() < room ? bytes.size() : room);
  return bytes.size();
}
void uplink_offer(void* self, std::uint32_t slot) { of(self).offer(slot); }
// Slot and number of the packet; 0 for none.
int uplink_poll_send(void* self, std::uint32_t* slot, std::uint64_t* counter) {
  const auto send = of(self).poll_send();
  if (!send) return 0;
  *slot = send->slot;
  *counter = send->counter;
  return 1;
}
void uplink_not_sent(void* self, std::uint32_t slot) { of(self).not_sent(slot); }
void uplink_handle_result(void* self, std::uint32_t slot, std::uint64_t number) {
  of(self).handle_result(slot, number);
}
std::uint32_t uplink_handle_notice(void* self, std::uint64_t first, std::uint64_t count) {
  return of(self).handle_notice(first, count);
}
std::uint32_t uplink_in_flight(void* self) { return of(self).in_flight(); }
std::uint64_t uplink_packets_sent(void* self) { return of(self).packets_sent(); }
std::uint64_t uplink_sent_again(void* self) { return of(self).sent_again(); }
}
