// Stands before libstdc++: `operator new` throws std::bad_alloc once, at the count-th call after `fail_after`: of the
// thread that called that, or of all others.
//
// c++ -shared -fPIC failing_new.cpp -o failing_new.so, then LD_PRELOAD.
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

namespace {
std::atomic<long> left{0};
std::atomic<std::thread::id> caller;
std::atomic<bool> fails_elsewhere{false};

bool is_meant() { return (std::this_thread::get_id() != caller.load()) == fails_elsewhere.load(); }
}  // namespace

extern "C" void fail_after(long count, bool elsewhere) {
  caller.store(std::this_thread::get_id());
  fails_elsewhere.store(elsewhere);
  left.store(count);
}

void* operator new(std::size_t bytes) {
  if (left.load(std::memory_order_relaxed) > 0 && is_meant() && left.fetch_sub(1) == 1) throw std::bad_alloc();
  if (void* found = std::malloc(bytes == 0 ? 1 : bytes)) return found;
  throw std::bad_alloc();
}

void operator delete(void* place) noexcept { std::free(place); }
void operator delete(void* place, std::size_t) noexcept { std::free(place); }
