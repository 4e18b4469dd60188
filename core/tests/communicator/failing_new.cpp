// Preloaded before libstdc++: `operator new` throws std::bad_alloc once, at the count-th call after `fail_after`. Only
// calls of the thread that called `fail_after` count, or only those of all other threads.
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

bool counts() { return (std::this_thread::get_id() != caller.load()) == fails_elsewhere.load(); }
}  // namespace

extern "C" void fail_after(long count, bool elsewhere) {
  caller.store(std::this_thread::get_id());
  fails_elsewhere.store(elsewhere);
  left.store(count);
}

void* operator new(std::size_t bytes) {
  if (left.load(std::memory_order_relaxed) > 0 && counts() && left.fetch_sub(1) == 1) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
