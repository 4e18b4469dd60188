#include <netfold/engine/engine.hpp>
#include <netfold/engine/operation.hpp>
#include <netfold/engine/sampler.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace netfold::engine {

std::vector<EventRecord> EventLog::after(std::uint64_t since) const {
  std::vector<EventRecord> newest;
  for (std::uint64_t next = std::max(since, total_ - records_.size()); next < total_; ++next) {
    newest.push_back(records_[next % kCapacity]);
  }
  return newest;
}

bool Operation::wait(std::int64_t timeout_ns) const {
  if (done()) return true;
  const EngineCallScope counted;
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done(); };
  if (timeout_ns < 0) {
    condition_.wait(lock, is_done);
    return true;
  }
  return condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_done);
}

bool Operation::notify() {
  {
    std::lock_guard lock(mutex_);
    if (done()) return false;
    notify_ = true;
  }
  // The caller asked for a notification and will not drive the group, so wake the engine thread.
  Engine::instance().wake();
  return true;
}

std::string Operation::describe(int rank) const {
  char waited[32];
  std::snprintf(waited, sizeof waited, "%.1f s", static_cast<double>(now_ns() - record_.queued_ns) / 1e9);
  std::string text =
      "rank " + std::to_string(rank) + ": " + collective::name(call_.kind) + " #" + std::to_string(call_.sequence);
  if (call_.elements() > 0) {
    text += " of " + std::to_string(call_.elements()) + " " + kernels::name(call_.dtype) + " (" +
            std::to_string(call_.tensor().bytes) + " bytes)";
  }
  text += std::string(" by ") + collective::name(call_.algorithm);
  if (site_ != nullptr) text += std::string(", called at ") + site_;
  return text + ", after " + waited + ",";
}

std::string Operation::within_timeout() const {
  char text[48];
  std::snprintf(text, sizeof text, "within its timeout of %.1f s", static_cast<double>(timeout_ns_) / 1e9);
  return text;
}

}  // namespace netfold::engine
