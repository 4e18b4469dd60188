// What happens to a group's connections, and what is told of it: errands that others give to whoever drives.
#include <poll.h>
#include <netfold/engine/engine.hpp>

#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <utility>

namespace netfold::engine {

void Group::run_errand(std::function<void()> errand) {
  std::unique_lock lock(mutex_);
  if (driver_ == Driver::none) {
    driver_ = Driver::caller;
    lock.unlock();
    std::exception_ptr error;
    try {
      errand();
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
  std::packaged_task<void()> task(std::move(errand));
  auto done = task.get_future();
  errands_.push_back([&task] { task(); });
  wake_driver();
  lock.unlock();
  done.get();
}

transport::Mesh& Group::mesh_of(int lane) {
  if (lane == 0) return *mesh_;
  return lane == 1 ? lane_->mesh() : *spares_.at(static_cast<std::size_t>(lane) - 2);
}

void Group::on_switch_path(std::size_t shard, const std::function<void(collective::SwitchPath&)>& errand) {
  run_errand([&] {
    if (shard >= switch_paths_.size()) return;  // the group is over
    errand(*switch_paths_[shard]);
    publish_traffic();
    publish_status();
  });
}

std::optional<Group::Broken> Group::broken(int lane, int peer, int number) {
  std::optional<Broken> state;
  run_errand([&] {
    const auto* found = mesh_of(lane).rail(peer, number);
    if (found != nullptr && found->is_broken()) state = {found->received(), found->mends()};
  });
  return state;
}

std::optional<Group::Broken> Group::sever(int lane, int peer, int number, int mends) {
  // The driver only reads what is there; this thread waits for what the peer had sent, and for its end of stream.
  const std::int64_t until_ns = now_ns() + transport::Rail::kLastNs;
  std::optional<int> mended;  // how often the connection was when it was given up
  for (;;) {
    transport::Fd watched;
    run_errand([&] {
      auto* found = mesh_of(lane).rail(peer, number);
      if (found == nullptr || (mends >= 0 && found->mends() > mends)) return;
      if (found->mends() != mended.value_or(found->mends())) return;
      mended = found->mends();
      found->begin_sever();
      if (!found->is_severing()) return;
      if (found->read_rest() || now_ns() >= until_ns) return found->end_sever();
      watched = found->copy_of_socket();
    });
    if (!watched) return broken(lane, peer, number);
    const std::int64_t left_ms = (until_ns - now_ns()) / 1'000'000 + 1;
    pollfd more{watched.get(), POLLIN, 0};
    if (left_ms > 0) ::poll(&more, 1, static_cast<int>(left_ms));
  }
}

bool Group::mend(int lane, int peer, int number, int mends, transport::Fd socket, std::uint64_t peer_received,
                 const auth::StreamSecrets& secrets) {
  bool mended = false;
  run_errand([&] {
    auto* found = mesh_of(lane).rail(peer, number);
    mended = found != nullptr && found->mends() == mends && found->mend(std::move(socket), peer_received, secrets);
    if (mended) catch_up();
  });
  return mended;
}

void Group::lose(int lane, int peer, int number, int mends, const std::string& why) {
  run_errand([&] {
    auto* found = mesh_of(lane).rail(peer, number);
    if (found != nullptr && found->is_broken() && found->mends() == mends) found->lose(why);
  });
}

void Group::catch_up() {
  const bool of_mesh = mesh_->catch_up();
  const bool of_lane = lane_->mesh().catch_up();
  bool of_spares = true;
  for (const auto& spare : spares_) of_spares = spare->catch_up() && of_spares;
  std::lock_guard lock(mutex_);
  behind_ = !of_mesh || !of_lane || !of_spares;
}

void Group::look_whether_late(Operation& operation, std::int64_t now) {
  if (now < operation.late_ns_) return;
  News news{.what = News::What::late, .group = options_.id, .ranks = operation.algorithm_->awaited()};
  news.sequence = operation.call_.sequence;
  news.waited_ns = now - operation.record_.queued_ns;
  operation.late_ns_ = now + 2 * news.waited_ns;
  engine_.tell(std::move(news));
}

std::uint32_t Group::collectives_submitted() const {
  std::lock_guard lock(mutex_);
  return next_sequence_ - 1;
}

std::optional<std::string> Group::said(std::uint32_t sequence) const {
  std::lock_guard lock(mutex_);
  const auto& header = said_[sequence % kSaid];
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

void Engine::tell(News news) {
  std::lock_guard lock(news_mutex_);
  if (news_.size() == kMaxNews) news_.pop_front();
  news_.push_back(std::move(news));
  news_condition_.notify_one();
}

std::optional<News> Engine::next_news(std::int64_t timeout_ns) {
  std::unique_lock lock(news_mutex_);
  const std::uint64_t interrupts = news_interrupts_;
  news_condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                           [&] { return !news_.empty() || news_interrupts_ != interrupts; });
  if (news_.empty()) return std::nullopt;
  News news = std::move(news_.front());
  news_.pop_front();
  return news;
}

void Engine::interrupt_news() {
  std::lock_guard lock(news_mutex_);
  ++news_interrupts_;
  news_condition_.notify_all();
}

}  // namespace netfold::engine
