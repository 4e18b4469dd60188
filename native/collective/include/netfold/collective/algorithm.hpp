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
  // A wake-up was requested and may have come too early: poll once more before sleeping.
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
  // Does what can be done without blocking. Must not be called again after done or failed.
  virtual Progress poll(std::int64_t now_ns) = 0;
  // Adds the events that let poll() make progress.
  virtual void wait_for(WaitSet& set) const = 0;
  // Ranks that this rank waits for: a timeout's error names them. May be empty (in_network: ask the switch).
  virtual std::vector<int> awaited() const = 0;
  // Whether the awaited ranks have begun the call, and so may be waiting for other ranks that are at fault.
  virtual bool awaited_may_wait() const { return false; }

  // Whether the algorithm uses the mesh or will use it. A group's calls use the mesh one after another, in order.
  virtual bool on_mesh() const { return true; }
  // The call began before it may use the mesh: leave the mesh alone until take_mesh().
  virtual void wait_for_mesh() {}
  virtual void take_mesh() {}

  const Failure& failure() const { return failure_; }
  std::uint64_t wire_bytes() const { return wire_bytes_; }  // sent by this rank, headers included
  // Bytes of an all_reduce that are complete. Sent bytes may still be in queues, so received bytes count where known.
  virtual std::uint64_t settled_bytes() const { return wire_bytes_; }
  std::uint32_t retransmissions() const { return retransmissions_; }
  // Tensors whose memory was registered with a fabric already, and tensors that had to be registered.
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
  // The algorithm that ran instead of the chosen one; `local` where the chosen one ran.
  AlgorithmId substitute() const { return substitute_; }

 protected:
  Progress fail(Failure failure) {
    failure_ = std::move(failure);
    return Progress::failed;
  }
  // Adds the counts of an algorithm that ran a part of this call.
  void add_counts(const Algorithm& part) {
    wire_bytes_ += part.wire_bytes_;
    registrations_ += part.registrations_;
    retransmissions_ += part.retransmissions_;
    if (part.slowest_rank_ >= 0) slowest_rank_ = part.slowest_rank_;
  }
  Failure failure_;
  std::uint64_t wire_bytes_ = 0;
  std::uint32_t retransmissions_ = 0;
  Registrations registrations_;
  int slowest_rank_ = -1;
  AlgorithmId substitute_ = AlgorithmId::local;
};

}  // namespace netfold::collective
