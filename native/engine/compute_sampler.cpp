#include <fcntl.h>
#include <time.h>
#include <unistd.h>
#include <netfold/engine/compute_sampler.hpp>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace netfold::engine {

namespace {

std::int64_t read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// What calls have taken so far, and since when the one under way runs. The watched thread alone writes, between two
// steps of `version`: it is odd while it does. The fences pair as in StatusWrite (status.hpp): begin_write has W1 and
// W2, the second step of `version` is W4, ComputeSampler::look has R1 to R4. All fields are atomics, so no read is undefined.
struct Inside {
  std::atomic<std::uint32_t> version{0};
  std::atomic<std::int64_t> cpu_ns{0};
  std::atomic<std::int64_t> passed_ns{0};
  std::atomic<std::int64_t> entered_ns{0};  // 0: not inside
  std::atomic<std::int64_t> entered_cpu_ns{0};
};
Inside inside;

void begin_write() {
  inside.version.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // W2
}

}  // namespace

std::atomic<pthread_t> EngineCallScope::sampled_thread_{0};

void EngineCallScope::enter() {
  if (!pthread_equal(pthread_self(), sampled_thread_.load(std::memory_order_relaxed))) return;
  if (inside.entered_ns.load(std::memory_order_relaxed) != 0) return;  // a call within a call
  const std::int64_t cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
  begin_write();
  inside.entered_cpu_ns.store(cpu, std::memory_order_relaxed);
  inside.entered_ns.store(now_ns(), std::memory_order_relaxed);
  inside.version.fetch_add(1, std::memory_order_release);
  entered_ = true;
}

void EngineCallScope::leave() {
  const std::int64_t cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
  begin_write();
  const auto add = [](std::atomic<std::int64_t>& to, std::int64_t much) {
    to.store(to.load(std::memory_order_relaxed) + much, std::memory_order_relaxed);
  };
  add(inside.cpu_ns, cpu - inside.entered_cpu_ns.load(std::memory_order_relaxed));
  add(inside.passed_ns, now_ns() - inside.entered_ns.load(std::memory_order_relaxed));
  inside.entered_ns.store(0, std::memory_order_relaxed);
  inside.version.fetch_add(1, std::memory_order_release);
}

ComputeSampler::ComputeSampler(pthread_t thread, int id) : sampled_thread_(thread), pid_(getpid()) {
  if (pthread_getcpuclockid(thread, &clock_) != 0) throw std::runtime_error("that thread has no CPU clock");
  pthread_t none = 0;
  if (!EngineCallScope::sampled_thread_.compare_exchange_strong(none, thread)) {
    throw std::runtime_error("a thread of this process is watched already");
  }
  const std::string path = "/proc/self/task/" + std::to_string(id) + "/schedstat";
  queue_fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
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
    // A fork's child: the thread is the parent's, and nobody here can join it. What it saw is the parent's too.
    [[maybe_unused]] const auto* left = thread_.release();
    inside.version.store(0);
    inside.entered_ns.store(0);
    EngineCallScope::sampled_thread_.store(0);
    return;
  }
  stopping_.store(true);
  thread_->join();
  thread_.reset();
  say(read());
  put_held();
  EngineCallScope::sampled_thread_.store(0);
}

void ComputeSampler::run() {
  while (!stopping_.load()) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kSampleNs));
    say(read());
  }
}

ComputeSampler::Reading ComputeSampler::read() const {
  Reading now;
  std::int64_t entered = 0;
  std::int64_t entered_cpu = 0;
  for (std::uint32_t version = 0;;) {
    version = inside.version.load(std::memory_order_acquire);
    now.inside_cpu_ns = inside.cpu_ns.load(std::memory_order_relaxed);
    now.inside_ns = inside.passed_ns.load(std::memory_order_relaxed);
    entered = inside.entered_ns.load(std::memory_order_relaxed);
    entered_cpu = inside.entered_cpu_ns.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version % 2 == 0 && inside.version.load(std::memory_order_relaxed) == version) break;
    std::this_thread::yield();  // the writer may stand in the queue
  }
  now.cpu_ns = read_clock(clock_);
  now.at_ns = now_ns();
  if (queue_fd_ >= 0) {
    char text[64];
    const auto bytes = pread(queue_fd_, text, sizeof text - 1, 0);
    text[std::max<ssize_t>(bytes, 0)] = '\0';
    // "on a core, in the queue, how often": nanoseconds.
    char* second = nullptr;
    std::strtoll(text, &second, 10);
    now.queue_ns = std::strtoll(second, nullptr, 10);
  }
  if (entered != 0) {
    now.inside_cpu_ns += std::max<std::int64_t>(0, now.cpu_ns - entered_cpu);
    now.inside_ns += std::max<std::int64_t>(0, now.at_ns - entered);
  }
  return now;
}

void ComputeSampler::say(const Reading& now) {
  // Not on a core since: that it waited for one is only known when it has one.
  if (now.cpu_ns == last_.cpu_ns) return;
  const std::int64_t passed = now.at_ns - last_.at_ns;
  const std::int64_t cpu = (now.cpu_ns - last_.cpu_ns) - (now.inside_cpu_ns - last_.inside_cpu_ns);
  const std::int64_t queued = now.queue_ns - last_.queue_ns;
  const std::int64_t outside = std::clamp<std::int64_t>(passed - (now.inside_ns - last_.inside_ns), 0, passed);
  const std::int64_t counted = std::max<std::int64_t>(0, cpu + queued);
  const std::int64_t busy = std::min(counted, outside);
  // It stood in the queue when it was last looked at, and the kernel had not counted that yet.
  held_.busy_ns += std::min(counted - busy, held_.outside_ns - held_.busy_ns);
  put_held();
  held_ = {now.at_ns, passed, outside, busy};
  last_ = now;
}

void ComputeSampler::put_held() {
  if (held_.passed_ns == 0) return;
  // It was off its core for whole looks: those came before what it has done since.
  const bool rested =
      held_.passed_ns > kSampleNs + kSampleNs / 2 && held_.busy_ns > 0 && held_.busy_ns < held_.passed_ns;
  if (rested) put({held_.at_ns - held_.busy_ns, busy_ns_});
  busy_ns_ += held_.busy_ns;
  put({held_.at_ns, busy_ns_});
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
