// A C interface, for ctypes, to a ParentSender that is compiled from a changed source (test_parent_sender_search.py).
#include <netfold/protocol/parent_sender.hpp>

#include <cstring>

using netfold::protocol::ParentSender;

namespace {
ParentSender& of(void* self) { return *static_cast<ParentSender*>(self); }
}  // namespace

extern "C" {
void* parent_sender_new(std::uint32_t slots) { return new ParentSender(slots); }
void* parent_sender_copy(void* self) { return new ParentSender(of(self)); }
void parent_sender_delete(void* self) { delete static_cast<ParentSender*>(self); }
// Returns the number of bytes; writes at most `room` of them.
std::uint64_t parent_sender_canonical(void* self, unsigned char* out, std::uint64_t room) {
  std::vector<std::byte> bytes;
  of(self).append_canonical(bytes);
  std::memcpy(out, bytes.data(), bytes.size() < room ? bytes.size() : room);
  return bytes.size();
}
void parent_sender_offer(void* self, std::uint32_t slot) { of(self).offer(slot); }
// Writes the packet's slot and number; returns 0 where there is no packet.
int parent_sender_poll_send(void* self, std::uint32_t* slot, std::uint64_t* packet_number) {
  const auto send = of(self).poll_send();
  if (!send) return 0;
  *slot = send->slot;
  *packet_number = send->packet_number;
  return 1;
}
void parent_sender_not_sent(void* self, std::uint32_t slot) { of(self).not_sent(slot); }
void parent_sender_handle_result(void* self, std::uint32_t slot, std::uint64_t number) {
  of(self).handle_result(slot, number);
}
std::uint32_t parent_sender_handle_nack(void* self, std::uint64_t first, std::uint64_t count) {
  return of(self).handle_nack(first, count);
}
std::uint32_t parent_sender_in_flight(void* self) { return of(self).in_flight(); }
std::uint64_t parent_sender_packets_sent(void* self) { return of(self).packets_sent(); }
std::uint64_t parent_sender_sent_again(void* self) { return of(self).sent_again(); }
}
