// A C interface, for ctypes, to a Failover that is compiled from a changed source (recovery_mutants.py).
#include <netfold/collective/failover.hpp>

#include <cstring>

using netfold::collective::Failover;
using u64 = std::uint64_t;

namespace {
Failover& of(void* self) { return *static_cast<Failover*>(self); }
}  // namespace

extern "C" {
void* failover_new(u64 generation) { return new Failover(generation); }
void* failover_copy(void* self) { return new Failover(of(self)); }
void failover_delete(void* self) { delete static_cast<Failover*>(self); }
int failover_is_up(void* self) { return of(self).is_up(); }
u64 failover_generation(void* self) { return of(self).generation(); }
// Returns the membership in the low two bits, and in bit 2 whether it was promised.
int failover_freeze(void* self, u64 generation) {
  const Failover::Frozen frozen = of(self).freeze(generation);
  return static_cast<int>(frozen.which) | (frozen.promised ? 4 : 0);
}
int failover_accepts_results(void* self, u64 generation) { return of(self).accepts_results(generation); }
int failover_offers_results(void* self, u64 generation) { return of(self).offers_results(generation); }
int failover_fall_back(void* self, u64 generation, u64 end, int promised) {
  return static_cast<int>(of(self).fall_back(generation, end, promised != 0));
}
void failover_stand_by(void* self, u64 generation) { of(self).stand_by(generation); }
int failover_promise(void* self, u64 generation) { return of(self).promise(generation); }
u64 failover_announce(void* self) { return of(self).announce(); }
int failover_start(void* self, u64 number) { return static_cast<int>(of(self).start(number)); }
void failover_entered(void* self, u64 number, u64 first_chunk) { of(self).entered(number, first_chunk); }
void failover_finish(void* self, u64 number) { of(self).finish(number); }
int failover_mode(void* self, u64 number) { return static_cast<int>(of(self).mode(number)); }
// Returns the operation's number; -1: none.
std::int64_t failover_host_operation(void* self) {
  const auto number = of(self).host_operation();
  return number ? static_cast<std::int64_t>(*number) : -1;
}
int failover_follow(void* self, u64 number, u64 announced) { return static_cast<int>(of(self).follow(number, announced)); }
// Returns the number of bytes; writes at most `room` of them.
u64 failover_canonical(void* self, unsigned char* out, u64 room) {
  std::vector<std::byte> bytes;
  of(self).append_canonical(bytes);
  std::memcpy(out, bytes.data(), bytes.size() < room ? bytes.size() : room);
  return bytes.size();
}
}
