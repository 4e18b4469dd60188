#include <netfold/engine/engine.hpp>
#include <netfold/engine/operation.hpp>
#include <netfold/engine/sampler.hpp>

#include <algorithm>
#include <cstdio>

namespace netfold::engine {

namespace {

std::string seconds_text(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / 1e9);
  return text;
}

}  // namespace

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
  return condition_.wait_until(lock, now_ns() + timeout_ns, is_done);
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
  return call_and_site(rank) + ", after " + seconds_text(now_ns() - record_.queued_ns) + ",";
}

std::string Operation::describe_timeout(int rank) const {
  return call_and_site(rank) + ", timed out after " + seconds_text(now_ns() - record_.queued_ns) + " (its timeout is " +
         seconds_text(timeout_ns_) + ")";
}

std::string Operation::call_and_site(int rank) const {
  std::string text =
      "rank " + std::to_string(rank) + ": " + collective::name(call_.kind) + " #" + std::to_string(call_.sequence);
  if (call_.elements() > 0) {
    text += " of " + std::to_string(call_.elements() / static_cast<std::size_t>(carried_values(call_.element()))) +
            " " + collective::name(call_.element()) + " (" + std::to_string(call_.tensor().bytes) + " bytes)";
  }
  text += std::string(" by ") + collective::name(call_.algorithm);
  if (site_ != nullptr) text += std::string(", called at ") + site_;
  return text;
}

}  // namespace netfold::engine
