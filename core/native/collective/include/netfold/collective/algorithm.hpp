// A resumable machine: every algorithm, in-network aggregation included, is one.
#pragma once

#include <poll.h>
#include <netfold/collective/call.hpp>

#include <algorithm>
#include <vector>

namespace netfold::collective {

// Events that a sleeping driver waits for.
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
  // Bytes of an all_reduce that are complete. Sent bytes may still be in queues, so received bytes count where known.
  virtual std::uint64_t settled_bytes() const { return counts_.wire_bytes; }
  // Tensors whose memory was registered with a fabric already, and tensors that had to be registered.
  struct Registrations {
    std::uint32_t hits = 0;
    std::uint32_t misses = 0;
    void operator+=(const Registrations& other) {
      hits += other.hits;
      misses += other.misses;
    }
  };
  struct Counts {
    std::uint64_t wire_bytes = 0;  // sent by this rank, headers included
    std::uint32_t retransmissions = 0;
    Registrations registrations;
    int slowest_rank = -1;  // -1: not known
    // Adds the counts of a part of the same call.
    void operator+=(const Counts& part) {
      wire_bytes += part.wire_bytes;
      retransmissions += part.retransmissions;
      registrations += part.registrations;
      if (part.slowest_rank >= 0) slowest_rank = part.slowest_rank;
    }
  };
  const Counts& counts() const { return counts_; }
  // The algorithm that ran instead of the chosen one; `local` where the chosen one ran.
  AlgorithmId substitute() const { return substitute_; }

 protected:
  Progress fail(Failure failure) {
    failure_ = std::move(failure);
    return Progress::failed;
  }
  Failure failure_;
  Counts counts_;
  AlgorithmId substitute_ = AlgorithmId::local;
};

}  // namespace netfold::collective
