// What happens to a group's connections, and what is told of it: errands that others give to whoever drives.
#include <poll.h>
#include <netfold/engine/engine.hpp>

#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <utility>

namespace netfold::engine {

void Group::run_driver_task(std::function<void()> action) {
  std::unique_lock lock(mutex_);
  if (driver_ == Driver::none) {
    driver_ = Driver::caller;
    lock.unlock();
    std::exception_ptr error;
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    driver_ = Driver::none;
    driver_left_.notify_all();
    const bool more = has_work();
    lock.unlock();
    if (more) engine_.wake();
    if (error) std::rethrow_exception(error);
    return;
  }
  // The asking thread gets its exception; the driver does not.
  std::packaged_task<void()> task(std::move(action));
  auto done = task.get_future();
  driver_tasks_.push_back([&task] { task(); });
  wake_driver();
  lock.unlock();
  done.get();
}

transport::Mesh& Group::mesh_of(int lane) {
  if (lane == 0) return *mesh_;
  return lane == 1 ? lane_->mesh() : *fallback_meshes_.at(static_cast<std::size_t>(lane) - 2);
}

void Group::on_switch_path(std::size_t shard, const std::function<void(collective::SwitchPath&)>& action) {
  run_driver_task([&] {
    if (shard >= switch_paths_.size()) return;  // the group is over
    action(*switch_paths_[shard]);
    publish_traffic();
    publish_status();
  });
}

std::optional<Group::Broken> Group::broken(int lane, int peer, int number) {
  std::optional<Broken> state;
  run_driver_task([&] {
    const auto* found = mesh_of(lane).rail(peer, number);
    if (found != nullptr && found->is_broken()) state = {found->received(), found->reconnects()};
  });
  return state;
}

std::optional<Group::Broken> Group::disconnect(int lane, int peer, int number, int reconnects) {
  // The driver only reads what is there; this thread waits for what the peer had sent, and for its end of stream.
  const std::int64_t until_ns = now_ns() + transport::ResumableSocket::kLastNs;
  std::optional<int> reconnected;  // how often the connection was when it was given up
  for (;;) {
    transport::Fd watched;
    run_driver_task([&] {
      auto* found = mesh_of(lane).rail(peer, number);
      if (found == nullptr || (reconnects >= 0 && found->reconnects() > reconnects)) return;
      if (found->reconnects() != reconnected.value_or(found->reconnects())) return;
      reconnected = found->reconnects();
      found->begin_disconnect();
      if (!found->is_disconnecting()) return;
      if (found->drain() || now_ns() >= until_ns) return found->end_disconnect();
      watched = found->duplicate_socket();
    });
    if (!watched) return broken(lane, peer, number);
    const std::int64_t left_ms = (until_ns - now_ns()) / 1'000'000 + 1;
    pollfd more{watched.get(), POLLIN, 0};
    if (left_ms > 0) ::poll(&more, 1, static_cast<int>(left_ms));
  }
}

bool Group::reconnect(int lane, int peer, int number, int reconnects, transport::Fd socket, std::uint64_t peer_received,
                      const auth::StreamSecrets& secrets) {
  bool reconnected = false;
  run_driver_task([&] {
    auto* found = mesh_of(lane).rail(peer, number);
    reconnected = found != nullptr && found->reconnects() == reconnects &&
                  found->reconnect(std::move(socket), peer_received, secrets);
    if (reconnected) flush();
  });
  return reconnected;
}

void Group::give_up(int lane, int peer, int number, int reconnects, const std::string& why) {
  run_driver_task([&] {
    auto* found = mesh_of(lane).rail(peer, number);
    if (found != nullptr && found->is_broken() && found->reconnects() == reconnects) found->give_up(why);
  });
}

void Group::flush() {
  const bool of_mesh = mesh_->flush();
  const bool of_lane = lane_->mesh().flush();
  bool of_spares = true;
  for (const auto& fallback : fallback_meshes_) of_spares = fallback->flush() && of_spares;
  std::lock_guard lock(mutex_);
  behind_ = !of_mesh || !of_lane || !of_spares;
}

void Group::check_overdue(Operation& operation, std::int64_t now) {
  if (now < operation.overdue_ns_) return;
  AsyncEvent event{.kind = AsyncEvent::Kind::overdue, .group = options_.id, .ranks = operation.algorithm_->awaited()};
  event.sequence = operation.call_.sequence;
  event.waited_ns = now - operation.record_.queued_ns;
  operation.overdue_ns_ = now + 2 * event.waited_ns;
  engine_.post_event(std::move(event));
}

std::uint32_t Group::collectives_submitted() const {
  std::lock_guard lock(mutex_);
  return next_sequence_ - 1;
}

std::optional<std::string> Group::recent_call(std::uint32_t sequence) const {
  std::lock_guard lock(mutex_);
  const auto& header = recent_calls_[sequence % kRecentCalls];
  if (sequence == 0 || header.sequence != sequence) return std::nullopt;
  return header.summary();
}

std::string Group::last_seen() const {
  StatusEntry entry;
  if (!StatusRead::copy(status_, entry)) return "in an unknown state (too many groups to keep track of)";
  const auto kind = [](std::uint8_t value) {
    return std::string(collective::name(static_cast<collective::Kind>(value)));
  };
  const auto at = [](const char* site) { return site[0] == '\0' ? std::string() : std::string(", called at ") + site; };
  const auto since = [](std::int64_t when_ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(now_ns() - when_ns) / 1e9);
    return std::string(text);
  };
  std::string text;
  if (entry.failed != 0) {
    text = std::string("in a group that failed (") + entry.failure + ")";
  } else if (entry.sequence != 0) {
    text = "in " + kind(entry.kind) + " #" + std::to_string(entry.sequence) + " of " + std::to_string(entry.bytes) +
           " bytes for " + since(entry.queued_ns) + at(entry.site);
    if (entry.awaited_count > 0) text += ", waiting for rank " + std::to_string(entry.awaited[0]);
    if (entry.awaited_count > 1) text += " and " + std::to_string(entry.awaited_count - 1) + " more";
  } else {
    text = "in no collective for " + since(entry.done_sequence != 0 ? entry.done_ns : entry.joined_ns);
    text += entry.done_sequence == 0 ? std::string(", since it joined")
                                     : ", its last having been " + kind(entry.done_kind) + " #" +
                                           std::to_string(entry.done_sequence) + at(entry.done_site);
  }
  if (entry.failed == 0 && entry.without_switch != 0) text += "; its switch is lost";
  if (entry.failed == 0 && entry.transfers > 0) {
    const bool is_send = entry.transfer_kind == static_cast<std::uint8_t>(collective::Kind::send);
    text += std::string("; in a ") + (is_send ? "send to " : "receive from ") +
            (entry.transfer_peer < 0 ? "any rank" : "rank " + std::to_string(entry.transfer_peer)) + " with tag " +
            std::to_string(entry.transfer_tag) + " of " + std::to_string(entry.transfer_bytes) + " bytes for " +
            since(entry.transfer_ns) + at(entry.transfer_site);
  }
  return text;
}

void Engine::post_event(AsyncEvent event) {
  std::lock_guard lock(async_event_mutex_);
  if (async_events_.size() == kMaxAsyncEvents) async_events_.pop_front();
  async_events_.push_back(std::move(event));
  async_event_condition_.notify_one();
}

std::optional<AsyncEvent> Engine::next_async_event(std::int64_t timeout_ns) {
  std::unique_lock lock(async_event_mutex_);
  const std::uint64_t interrupts = async_event_interrupts_;
  async_event_condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                  [&] { return !async_events_.empty() || async_event_interrupts_ != interrupts; });
  if (async_events_.empty()) return std::nullopt;
  AsyncEvent event = std::move(async_events_.front());
  async_events_.pop_front();
  return event;
}

void Engine::interrupt_async_events() {
  std::lock_guard lock(async_event_mutex_);
  ++async_event_interrupts_;
  async_event_condition_.notify_all();
}

}  // namespace netfold::engine
