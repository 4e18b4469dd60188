// Preloaded before libstdc++ and libc: measures how long the engine's thread works between two looks at the clock, which
// it takes before every poll.
//
// c++ -shared -fPIC poll_times.cpp -o poll_times.so -ldl, then LD_PRELOAD.
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <utility>

extern "C" {
std::atomic<long> longest_ns{0};  // processor time of one thread, but for the main thread

int clock_gettime(clockid_t clock, timespec* now) {
  static const auto real = reinterpret_cast<decltype(&clock_gettime)>(dlsym(RTLD_NEXT, "clock_gettime"));
  static thread_local const bool is_main = gettid() == getpid();
  static thread_local long seen_ns = 0;
  if (!is_main && clock == CLOCK_MONOTONIC) {
    timespec used{};
    real(CLOCK_THREAD_CPUTIME_ID, &used);
    const long used_ns = used.tv_sec * 1'000'000'000 + used.tv_nsec;
    const long worked_ns = used_ns - std::exchange(seen_ns, used_ns);
    long longest = longest_ns.load();
    while (worked_ns > longest && !longest_ns.compare_exchange_weak(longest, worked_ns)) {
    }
  }
  return real(clock, now);
}
}
