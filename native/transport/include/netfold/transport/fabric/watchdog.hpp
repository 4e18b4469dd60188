// What ends this process where a provider does not come back from a call.
//
// A provider that goes through memory which processes share may keep spin locks there: libfabric's shm does. A rank
// that is killed while it holds one leaves the others turning inside a call, past every deadline, and nothing can take
// a thread back from there. So a thread of its own looks at all wires once a second; one that has been in the same call
// for kLooks of them is named on stderr, and the process ends. It counts looks and no time: while a process is stopped,
// nobody looks.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace netfold::transport::fabric {

class Watchdog {
 public:
  static constexpr int kLooks = 5;

  // `provider`: as it is to be named. Lives as long as the wire.
  explicit Watchdog(std::string provider);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Around one call. A wire has one at a time.
  class Call {
   public:
    explicit Call(Watchdog& watch) : watch_(watch) { watch_.toggle(); }
    ~Call() { watch_.toggle(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Watchdog& watch_;
  };

 private:
  struct Monitor;
  static Monitor& monitor();

  // Odd: in a call. One writer, so it needs no atomic addition.
  void toggle() { toggles_.store(toggles_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  std::string provider_;
  std::atomic<std::uint64_t> toggles_ = 0;
  // The watcher's.
  std::uint64_t seen_toggles_ = 0;
  int looks_ = 0;
};

}  // namespace netfold::transport::fabric
