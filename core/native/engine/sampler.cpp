#include <fcntl.h>
#include <unistd.h>
#include <netfold/engine/event.hpp>
#include <netfold/engine/sampler.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace netfold::engine {

namespace {

// The time that calls took so far, and the start of the call under way. The sampled thread alone writes, between two
// steps of `version`, which is odd during the write. The fences pair as in StatusWrite (status.hpp): begin_write has W1
// and W2, the second step of `version` is W4, ComputeSampler::read has R1 to R4. All fields are atomics, so no read is
// undefined.
struct Calls {
  std::atomic<std::uint32_t> version{0};
  std::atomic<std::int64_t> cpu_ns{0};
  std::atomic<std::int64_t> duration_ns{0};
  std::atomic<std::int64_t> entered_ns{0};  // 0: no call is under way
  std::atomic<std::int64_t> entered_cpu_ns{0};
};
Calls calls;

void begin_write() {
  calls.version.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // W2
}

}  // namespace

std::atomic<pthread_t> EngineCallScope::sampled_thread_{0};

void EngineCallScope::enter() {
  if (!pthread_equal(pthread_self(), sampled_thread_.load(std::memory_order_relaxed))) return;
  if (calls.entered_ns.load(std::memory_order_relaxed) != 0) return;  // a call within a call
  const std::int64_t cpu = transport::clock_ns(CLOCK_THREAD_CPUTIME_ID);
  begin_write();
  calls.entered_cpu_ns.store(cpu, std::memory_order_relaxed);
  calls.entered_ns.store(now_ns(), std::memory_order_relaxed);
  calls.version.fetch_add(1, std::memory_order_release);
  entered_ = true;
}

void EngineCallScope::leave() {
  const std::int64_t cpu = transport::clock_ns(CLOCK_THREAD_CPUTIME_ID);
  begin_write();
  const auto add = [](std::atomic<std::int64_t>& total, std::int64_t more) {
    total.store(total.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  };
  add(calls.cpu_ns, cpu - calls.entered_cpu_ns.load(std::memory_order_relaxed));
  add(calls.duration_ns, now_ns() - calls.entered_ns.load(std::memory_order_relaxed));
  calls.entered_ns.store(0, std::memory_order_relaxed);
  calls.version.fetch_add(1, std::memory_order_release);
}

ComputeSampler::ComputeSampler(pthread_t thread, int id) : pid_(getpid()) {
  const std::string task = "/proc/self/task/" + std::to_string(id);
  if (pthread_getcpuclockid(thread, &clock_) != 0) {
    throw std::runtime_error("thread " + std::to_string(id) + " has no CPU clock");
  }
  pthread_t none = 0;
  if (!EngineCallScope::sampled_thread_.compare_exchange_strong(none, thread)) {
    throw std::runtime_error("a ComputeSampler runs in this process already; stop it first");
  }
  queue_fd_ = open((task + "/schedstat").c_str(), O_RDONLY | O_CLOEXEC);
  last_ = read();
  samples_.push_back({last_.at_ns, 0});
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

ComputeSampler::~ComputeSampler() {
  stop();
  if (queue_fd_ >= 0) ::close(queue_fd_);
}

void ComputeSampler::stop() {
  if (thread_ == nullptr) return;
  if (pid_ != getpid()) {
    // A fork's child cannot join the parent's thread. The samples are the parent's too.
    [[maybe_unused]] const auto* left = thread_.release();
    calls.version.store(0);
    calls.entered_ns.store(0);
    EngineCallScope::sampled_thread_.store(0);
    return;
  }
  stopping_.store(true);
  thread_->join();
  thread_.reset();
  add(read());
  put_held();
  EngineCallScope::sampled_thread_.store(0);
}

void ComputeSampler::run() {
  while (!stopping_.load()) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kSampleNs));
    add(read());
  }
}

ComputeSampler::Reading ComputeSampler::read() const {
  Reading now;
  std::int64_t entered = 0;
  std::int64_t entered_cpu = 0;
  for (;;) {
    const std::uint32_t version = calls.version.load(std::memory_order_acquire);
    now.in_calls_cpu_ns = calls.cpu_ns.load(std::memory_order_relaxed);
    now.in_calls_ns = calls.duration_ns.load(std::memory_order_relaxed);
    entered = calls.entered_ns.load(std::memory_order_relaxed);
    entered_cpu = calls.entered_cpu_ns.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version % 2 == 0 && calls.version.load(std::memory_order_relaxed) == version) break;
    std::this_thread::yield();  // the writer may be preempted
  }
  now.cpu_ns = transport::clock_ns(clock_);
  now.at_ns = now_ns();
  if (queue_fd_ >= 0) {
    char text[64];
    const auto bytes = pread(queue_fd_, text, sizeof text - 1, 0);
    text[std::max<ssize_t>(bytes, 0)] = '\0';
    // schedstat: ns on a core, ns in the queue, number of time slices.
    char* second = nullptr;
    std::strtoll(text, &second, 10);
    now.queue_ns = std::strtoll(second, nullptr, 10);
  }
  if (entered != 0) {
    now.in_calls_cpu_ns += std::max<std::int64_t>(0, now.cpu_ns - entered_cpu);
    now.in_calls_ns += std::max<std::int64_t>(0, now.at_ns - entered);
  }
  return now;
}

void ComputeSampler::add(const Reading& now) {
  // The thread was not on a core since: its queue time is only known once it is.
  if (now.cpu_ns == last_.cpu_ns) return;
  const std::int64_t duration = now.at_ns - last_.at_ns;
  const std::int64_t cpu = (now.cpu_ns - last_.cpu_ns) - (now.in_calls_cpu_ns - last_.in_calls_cpu_ns);
  const std::int64_t queued = now.queue_ns - last_.queue_ns;
  const std::int64_t outside = std::clamp<std::int64_t>(duration - (now.in_calls_ns - last_.in_calls_ns), 0, duration);
  const std::int64_t counted = std::max<std::int64_t>(0, cpu + queued);
  const std::int64_t busy = std::min(counted, outside);
  // The rest passed in the queue before the last reading, when the kernel had not counted it yet.
  held_.busy_ns += std::min(counted - busy, held_.outside_ns - held_.busy_ns);
  put_held();
  held_ = {now.at_ns, duration, outside, busy};
  last_ = now;
}

void ComputeSampler::put_held() {
  if (held_.duration_ns == 0) return;
  // The thread was off its core for whole sample periods: those came before what it has done since.
  const bool rested =
      held_.duration_ns > kSampleNs + kSampleNs / 2 && held_.busy_ns > 0 && held_.busy_ns < held_.duration_ns;
  if (rested) put({held_.end_ns - held_.busy_ns, busy_ns_});
  busy_ns_ += held_.busy_ns;
  put({held_.end_ns, busy_ns_});
  held_ = {};
}

void ComputeSampler::put(ComputeSample sample) {
  std::lock_guard lock(mutex_);
  if (samples_.size() < kMaxSamples) samples_.push_back(sample);
}

std::vector<ComputeSample> ComputeSampler::take() {
  std::vector<ComputeSample> taken;
  std::lock_guard lock(mutex_);
  taken.swap(samples_);
  return taken;
}

}  // namespace netfold::engine
