// Functions that ctypes can call, over an Arrivals that is compiled from a changed source (test_arrivals_search.py).
#include <netfold/protocol/arrivals.hpp>

using netfold::protocol::Arrivals;

extern "C" {
void* arrivals_new() { return new Arrivals(); }
void* arrivals_copy(void* self) { return new Arrivals(*static_cast<Arrivals*>(self)); }
void arrivals_delete(void* self) { delete static_cast<Arrivals*>(self); }
int arrivals_equal(void* self, void* other) { return *static_cast<Arrivals*>(self) == *static_cast<Arrivals*>(other); }
void arrivals_take(void* self, std::uint64_t counter, std::uint64_t* first, std::uint32_t* count) {
  const Arrivals::Gap gap = static_cast<Arrivals*>(self)->take(counter);
  *first = gap.first;
  *count = gap.count;
}
}
