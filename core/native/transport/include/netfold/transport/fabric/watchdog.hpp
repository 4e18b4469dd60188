// Ends this process where a provider does not return from a call.
//
// A provider may keep spin locks in memory that processes share; libfabric's shm does. A rank that is killed while it
// holds such a lock leaves the others spinning inside a call, past every deadline, and no thread can be taken back from
// there. So a monitor thread checks all endpoints once a second. Where one has been in the same call for kLooks checks,
// the thread names its provider on stderr and ends the process. It counts checks instead of time, since no check
// happens while the process is stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace netfold::transport::fabric {

class Watchdog {
 public:
  static constexpr int kLooks = 5;

  // provider: its name for the message. One watchdog an endpoint, of the same lifetime.
  explicit Watchdog(std::string provider);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Marks one call for its lifetime. An endpoint makes one call at a time.
  class Call {
   public:
    explicit Call(Watchdog& watchdog) : watchdog_(watchdog) { watchdog_.toggle(); }
    ~Call() { watchdog_.toggle(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Watchdog& watchdog_;
  };

 private:
  struct Monitor;
  static Monitor& monitor();

  // An odd count means: in a call. There is one writer, so no atomic addition is needed.
  void toggle() { toggles_.store(toggles_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  std::string provider_;
  std::atomic<std::uint64_t> toggles_ = 0;
  // Of the monitor:
  std::uint64_t seen_toggles_ = 0;
  int looks_ = 0;
};

}  // namespace netfold::transport::fabric
