// How the threads of this component sleep and wake one another.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <netfold/collective/algorithm.hpp>
#include <netfold/engine/event.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <cerrno>

namespace netfold::engine {

// An eventfd. Throws std::system_error.
inline transport::Fd make_event() {
  transport::Fd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event) transport::throw_errno("eventfd");
  return event;
}

inline void signal(const transport::Fd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof one);
}

// Reset an event or a timer. True: it was signalled.
inline bool clear(const transport::Fd& event) {
  std::uint64_t value = 0;
  return ::read(event.get(), &value, sizeof value) > 0;
}

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
  timespec timeout{};
  if (set.wake_ns >= 0) {
    const std::int64_t left = std::max<std::int64_t>(0, set.wake_ns - now_ns());
    timeout = {.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
  }
  return ppoll(set.fds.data(), set.fds.size(), set.wake_ns < 0 ? nullptr : &timeout, nullptr) >= 0 || errno != EINTR;
}

}  // namespace netfold::engine
