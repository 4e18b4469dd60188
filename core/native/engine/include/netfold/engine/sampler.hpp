// Samples how much one thread of this process computes. A profile compares communication with these samples, to say how
// much of the communication was hidden behind computing.
//
// busy = time on a core + time in the run queue, both outside of calls into the engine. The kernel counts both for each
// thread. `EngineCallScope` stands in every call that can wait or run an operation, and its time is subtracted. So a
// thread that spins for a message does not compute, and a preempted thread does.
//
// The kernel counts queue time when the thread gets a core, so later than it passed. Hence:
//   - a thread that has not run since the last sample gets no new sample;
//   - a thread that has run gets its off-core time put first;
//   - queue time beyond the interval is added to the interval before;
//   - busy time never exceeds the time outside of calls.
// Within one interval the order of computing and waiting is not known.
//
// May use: the clock. Cost: one relaxed load a call without a sampler; else two reads of the thread's CPU clock a call,
// and a thread that wakes every kSampleNs.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace netfold::engine {

// Python reads arrays of this struct as a NumPy structured dtype (netfold.profile.run.PROGRESS).
struct ComputeSample {
  std::int64_t at_ns = 0;    // CLOCK_MONOTONIC
  std::int64_t busy_ns = 0;  // since the sampler began; never decreases
};
static_assert(sizeof(ComputeSample) == 16);

// Marks a call into the engine. Only calls of the sampled thread count.
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

// At most one in a process. A fork's child has none, even if its parent has one.
class ComputeSampler {
 public:
  // thread: must outlive the sampler, as a process's main thread does. id: the kernel's thread id.
  // Throws std::runtime_error if another sampler runs.
  ComputeSampler(pthread_t thread, int id);
  ~ComputeSampler();

  // The samples since the last call, oldest first. At most kMaxSamples are kept between two calls; later ones are
  // dropped, and the next kept sample includes their busy time.
  std::vector<ComputeSample> take();
  // Take a last sample, and end.
  void stop();
  // False: the kernel does not report queue time, and busy is only the time on a core.
  bool sees_queue() const { return queue_fd_ >= 0; }

 private:
  static constexpr std::int64_t kSampleNs = 4'000'000;
  static constexpr std::size_t kMaxSamples = 1 << 16;

  // Totals of the sampled thread.
  struct Reading {
    std::int64_t at_ns = 0;
    std::int64_t cpu_ns = 0;
    std::int64_t queue_ns = 0;
    std::int64_t in_calls_cpu_ns = 0;
    std::int64_t in_calls_ns = 0;
  };
  Reading read() const;
  // The time between two readings; held until the next reading, which may know of further queue time in it.
  struct Interval {
    std::int64_t end_ns = 0;
    std::int64_t duration_ns = 0;
    std::int64_t outside_ns = 0;  // of calls into the engine
    std::int64_t busy_ns = 0;
  };
  void add(const Reading& now);
  void put_held();
  void put(ComputeSample sample);
  void run();

  clockid_t clock_ = 0;
  int queue_fd_ = -1;
  int pid_;
  Reading last_;
  Interval held_;
  std::int64_t busy_ns_ = 0;
  std::unique_ptr<std::thread> thread_;

  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // guards samples_
  std::vector<ComputeSample> samples_;
};

}  // namespace netfold::engine
