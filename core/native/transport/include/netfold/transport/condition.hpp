// A condition variable whose timed wait follows the steady clock.
//
// std::condition_variable::wait_for follows the wall clock where the C library has no pthread_cond_clockwait or the
// standard library does not use it, as libc++ for older glibc. A step of the wall clock would then shorten or lengthen
// a wait.
#pragma once

#include <pthread.h>
#include <netfold/transport/socket.hpp>

#include <cstdint>
#include <mutex>

namespace netfold::transport {

class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

  // Unlock until `is_met` returns true; it is called with the lock.
  template <class IsMet>
  void wait(std::unique_lock<std::mutex>& lock, IsMet is_met) {
    while (!is_met()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }
  // The same, until the time `deadline_ns` of now_ns() at the latest. Returns what `is_met` returned last.
  template <class IsMet>
  bool wait_until(std::unique_lock<std::mutex>& lock, std::int64_t deadline_ns, IsMet is_met) {
    const timespec until = timespec_of(deadline_ns);
    while (!is_met()) {
      if (pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &until) != 0) return is_met();
    }
    return true;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace netfold::transport
