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

class CallWatch {
 public:
  static constexpr int kLooks = 5;

  // `provider`: as it is to be named. Lives as long as the wire.
  explicit CallWatch(std::string provider);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // Around one call. A wire has one at a time.
  class Call {
   public:
    explicit Call(CallWatch& watch) : watch_(watch) { watch_.turn(); }
    ~Call() { watch_.turn(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CallWatch& watch_;
  };

 private:
  struct Watcher;
  static Watcher& watcher();

  // Odd: in a call. One writer, so it needs no atomic addition.
  void turn() { turns_.store(turns_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  std::string provider_;
  std::atomic<std::uint64_t> turns_ = 0;
  // The watcher's.
  std::uint64_t seen_turns_ = 0;
  int looks_ = 0;
};

}  // namespace netfold::transport::fabric
