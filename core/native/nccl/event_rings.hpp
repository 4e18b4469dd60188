// The events of NCCL's threads on the way to the profiler's thread: a ring for each of NCCL's threads.
//
// A thread that pushes takes no lock and never waits; after its first event it allocates nothing. A ring that becomes
// half full wakes the profiler's thread. A full ring drops the event, and counts it. The profiler's thread merges the
// rings by time. A thread that pushes marks its ring as busy before it reads the clock. The merge therefore stops at the
// time at which a busy ring was last seen idle: no earlier event can come afterwards.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <semaphore>
#include <vector>

namespace netfold::nccl {

struct Event {
  enum class Kind : std::uint8_t { start, stop, state, comm_ended };

  std::uint64_t id = 0;
  std::uint64_t parent = 0;  // 0: none
  std::int64_t at_ns = 0;    // CLOCK_MONOTONIC
  std::uint64_t value = 0;   // bytes, a count, or nanoseconds of the GPU's clock
  std::uint64_t sequence = 0;
  std::int32_t type = 0;   // of event_type or event_state
  std::int32_t peer = -1;  // or root
  std::uint32_t comm = 0;
  std::uint16_t channels = 0;  // a channel's number, or how many
  Kind kind = Kind::start;
  bool is_send = false;
  std::uint8_t function = 0, dtype = 0, algorithm = 0, protocol = 0;  // of names.hpp
};
static_assert(sizeof(Event) == 64);

class EventRings {
 public:
  static constexpr std::size_t kEvents = 4096;  // of one ring: 256 KiB
  static constexpr std::size_t kRings = 256;    // threads at a time

  EventRings() = default;
  ~EventRings();
  EventRings(const EventRings&) = delete;
  EventRings& operator=(const EventRings&) = delete;

  // A number that no other event of the process has, which a start is pushed with; 0: there is no ring for this thread.
  std::uint64_t next_id();
  // Adds the time. False: the event was dropped.
  bool push(Event event);
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

  // For the profiler's thread: until a ring is half full, `wake` was called, or the time is over.
  void wait(std::chrono::milliseconds most) {
    if (wakes_.try_acquire_for(most)) {
      while (wakes_.try_acquire()) {
      }
    }
  }
  void wake() { wakes_.release(); }

  // For the profiler's thread: the events since the last call, by time, up to the time before which none can come any
  // more. everything: also the later ones.
  std::vector<Event> take(bool everything);

 private:
  struct alignas(64) Ring {
    std::atomic<std::uint64_t> head{0};
    std::atomic<bool> busy{false};
    std::uint64_t next_id = 0;
    std::atomic<bool> is_used{true};
    alignas(64) std::atomic<std::uint64_t> tail{0};
    std::int64_t idle_ns = 0;  // of the taking thread: no event before this time can come
    std::array<Event, kEvents> events;
  };
  struct Claim;

  Ring* ring();
  Ring* claim();

  std::array<std::atomic<Ring*>, kRings> rings_{};
  std::atomic<std::uint64_t> dropped_{0};
  std::counting_semaphore<> wakes_{0};
  std::vector<Event> held_;
};

}  // namespace netfold::nccl
