// How much one thread of this process has computed, looked at every few milliseconds: what a profile compares
// communication with, to say how much of it computing hid.
//
// busy = time on a core + time in the queue for one, both outside of calls into the engine. The kernel counts both for
// every thread; what falls into calls is taken off by `EngineCallScope`, which stands in every call that can wait or run an
// operation. So a thread that spins for a message does not compute, and one that was preempted does.
//
// Time in the queue is counted by the kernel when the thread gets its core, hence later than it passed: nothing is said
// of a thread that has not run since the last look, and when it has, its time off the core is put first; what it queued
// for longer than that was before that look. No more is taken as computing than there was time outside of calls.
// Between two looks neither order nor mixture is seen.
//
// May use: the clock. Costs: nobody watching, one relaxed load a call; watched, two readings of the thread's CPU clock
// a call, and a thread that looks at it every kSampleNs.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace netfold::engine {

// Python reads arrays of this as a NumPy structured dtype (netfold.profile.run.PROGRESS).
struct ComputeSample {
  std::int64_t at_ns = 0;    // CLOCK_MONOTONIC
  std::int64_t busy_ns = 0;  // since the watcher began; never falls
};
static_assert(sizeof(ComputeSample) == 16);

// Stands in a call into the engine. Only calls of the watched thread count.
class EngineCallScope {
 public:
  EngineCallScope() {
    if (sampled_thread_.load(std::memory_order_relaxed) != 0) enter();
  }
  ~EngineCallScope() {
    if (entered_) leave();
  }
  EngineCallScope(const EngineCallScope&) = delete;
  EngineCallScope& operator=(const EngineCallScope&) = delete;

 private:
  friend class ComputeSampler;
  void enter();
  static void leave();

  static std::atomic<pthread_t> sampled_thread_;  // 0: none
  bool entered_ = false;
};

// One at a time in a process. A fork's child has none, whatever its parent had.
class ComputeSampler {
 public:
  // The thread must outlive the watcher: a process's main thread does. `id` is the kernel's name for it. Throws
  // std::runtime_error where another watches already.
  ComputeSampler(pthread_t thread, int id);
  ~ComputeSampler();

  // The lines since the last call, oldest first. At most kMaxSamples are kept meanwhile; later ones are left out then, and
  // the next to be kept stands for them.
  std::vector<ComputeSample> take();
  // Ends with a last look.
  void stop();
  // False where the kernel does not say how long the thread queued: busy is its time on a core alone.
  bool sees_queue() const { return queue_fd_ >= 0; }

 private:
  static constexpr std::int64_t kSampleNs = 4'000'000;
  static constexpr std::size_t kMaxSamples = 1 << 16;

  struct Reading {
    std::int64_t at_ns = 0;
    std::int64_t cpu_ns = 0;    // of the thread
    std::int64_t queue_ns = 0;  // likewise
    std::int64_t inside_cpu_ns = 0;
    std::int64_t inside_ns = 0;
  };
  Reading read() const;
  // Between two looks; kept until the next one, which may know of time in the queue that was part of it.
  struct Stretch {
    std::int64_t at_ns = 0;  // its end
    std::int64_t passed_ns = 0;
    std::int64_t outside_ns = 0;  // of calls into the engine
    std::int64_t busy_ns = 0;
  };
  void say(const Reading& now);
  void put_held();
  void put(ComputeSample sample);
  void run();

  pthread_t sampled_thread_;
  clockid_t clock_ = 0;
  int queue_fd_ = -1;
  int pid_;
  Reading last_;
  Stretch held_;
  std::int64_t busy_ns_ = 0;
  std::unique_ptr<std::thread> thread_;

  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // guards what follows
  std::vector<ComputeSample> samples_;
};

}  // namespace netfold::engine
