// How the threads of this component sleep and wake one another.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <netfold/collective/algorithm.hpp>
#include <netfold/engine/event.hpp>

#include <algorithm>
#include <cerrno>

namespace netfold::engine {

// Wait between two polls of a spinning thread. On a busy host the awaited rank may be queued behind this thread for the
// core, so every 16th call yields, and every call with `yields`.
inline void pause(bool yields) {
  constexpr unsigned kPausesPerYield = 16;
  thread_local unsigned pauses = 0;
  if (yields || ++pauses % kPausesPerYield == 0) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Sleep until a descriptor of `set` is ready or the time `set.wake_ns`. False: a signal ended the sleep.
inline bool sleep_until_ready(collective::WaitSet& set) {
  timespec timeout = transport::timespec_of(std::max<std::int64_t>(0, set.wake_ns - now_ns()));
  int ready = ppoll(set.fds.data(), set.fds.size(), set.wake_ns < 0 ? nullptr : &timeout, nullptr);
  if (ready < 0 && errno == EINVAL) {
    // More descriptors than RLIMIT_NOFILE, which may have been lowered. Sleep with those that fit, and only until the
    // next poll, which looks at the remaining descriptors.
    constexpr std::int64_t kNextPollNs = 1'000'000;
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    timeout = transport::timespec_of(kNextPollNs);
    ready = ppoll(set.fds.data(), std::min<rlim_t>(set.fds.size(), limit.rlim_cur), &timeout, nullptr);
  }
  return ready >= 0 || errno != EINTR;
}

}  // namespace netfold::engine
