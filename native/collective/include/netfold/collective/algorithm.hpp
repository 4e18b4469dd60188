// A resumable machine: every algorithm, in-network aggregation included, is one.
#pragma once

#include <poll.h>
#include <netfold/collective/call.hpp>

#include <algorithm>
#include <vector>

namespace netfold::collective {

// What a sleeping driver waits for.
struct WaitSet {
  std::vector<pollfd> fds;
  std::int64_t wake_ns = -1;  // absolute, or -1
  // Somebody was asked to wake us, and may have been too early: look once more before sleeping.
  bool look_again = false;

  void clear() {
    fds.clear();
    wake_ns = -1;
    look_again = false;
  }

  void add(int fd, short events) { fds.push_back({fd, events, 0}); }
  void wake_at(std::int64_t when_ns) {
    if (when_ns >= 0) wake_ns = wake_ns < 0 ? when_ns : std::min(wake_ns, when_ns);
  }
};

enum class Progress : std::uint8_t { idle, moved, done, failed };

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Does what can be done without blocking. After done or failed it is not called again.
  virtual Progress poll(std::int64_t now_ns) = 0;
  // Adds what must happen before poll can move.
  virtual void wait_for(WaitSet& set) const = 0;
  // Ranks this rank is waiting for: what an error after a timeout names. May be empty (in_network: ask the
  // switch).
  virtual std::vector<int> awaited() const = 0;
  // Whether those ranks are under way themselves, and so may be waiting for yet others who are at fault.
  virtual bool awaited_may_wait() const { return false; }

  // Whether it still uses the mesh or will: the calls of a group use it one after another, in order. One that begins
  // before its turn is told to leave the mesh alone until then.
  virtual bool on_mesh() const { return true; }
  virtual void wait_for_mesh() {}
  virtual void take_mesh() {}

  const Failure& failure() const { return failure_; }
  std::uint64_t wire_bytes() const { return wire_bytes_; }  // sent by this rank, headers included
  // How far an all_reduce has come, in bytes: what has left this rank may be in queues, so what has come back counts.
  virtual std::uint64_t settled_bytes() const { return wire_bytes_; }
  std::uint32_t retransmissions() const { return retransmissions_; }
  // Tensors whose memory a fabric knew already, and those that it had to be told of.
  struct Registrations {
    std::uint32_t hits = 0;
    std::uint32_t misses = 0;
    void operator+=(const Registrations& other) {
      hits += other.hits;
      misses += other.misses;
    }
  };
  const Registrations& registrations() const { return registrations_; }
  int slowest_rank() const { return slowest_rank_; }
  // What ran in the place of the algorithm that was chosen, where something had to; else `local`.
  AlgorithmId substitute() const { return substitute_; }

 protected:
  Progress fail(Failure failure) {
    failure_ = std::move(failure);
    return Progress::failed;
  }
  Failure failure_;
  std::uint64_t wire_bytes_ = 0;
  std::uint32_t retransmissions_ = 0;
  Registrations registrations_;
  int slowest_rank_ = -1;
  AlgorithmId substitute_ = AlgorithmId::local;
};

}  // namespace netfold::collective
