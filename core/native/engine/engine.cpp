#include <pthread.h>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <new>

#include "sleep.hpp"

namespace netfold::engine {

Engine& Engine::instance() {
  // Never destroyed: threads of an exiting process may still use it. A fork's child gets an engine of its own: the
  // child has no copy of the parent's engine thread, and no thread that could release the parent's locks.
  static std::atomic<Engine*> engine = [] {
    pthread_atfork(nullptr, nullptr, [] { engine = new Engine(engine); });
    return new Engine(nullptr);
  }();
  return *engine;
}

// Create the instance when the library is loaded: after a fork during its creation the child would wait forever for a
// thread of the parent.
[[maybe_unused]] static const auto& made_at_load = Engine::instance();

void AsyncEvents::push(AsyncEvent event) {
  const bool of_connection = event.kind == AsyncEvent::Kind::unused || event.kind == AsyncEvent::Kind::broken;
  const Subject subject(event.kind, event.group, of_connection ? event.ranks.front() : -1, event.lane, event.rail);
  std::lock_guard lock(mutex_);
  const auto [known, is_new] = events_.try_emplace(subject, event);
  if (is_new) {
    order_.push(subject);
  } else if (event.kind == AsyncEvent::Kind::unconnected) {
    auto& ranks = known->second.ranks;
    for (const int rank : event.ranks) {
      if (std::ranges::find(ranks, rank) == ranks.end()) ranks.push_back(rank);
    }
  } else {
    known->second = std::move(event);
  }
}

std::optional<AsyncEvent> AsyncEvents::pop(std::int64_t timeout_ns) {
  const auto subject = order_.pop(timeout_ns);
  if (!subject) return std::nullopt;
  std::lock_guard lock(mutex_);
  auto node = events_.extract(*subject);
  if (node.empty()) return std::nullopt;
  return std::move(node.mapped());
}

void AsyncEvents::forget(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  std::erase_if(events_, [&](const auto& each) { return each.second.group == group; });
  order_.remove_if([&](const Subject& subject) { return std::get<1>(subject) == group; });
}

void Engine::keep(std::shared_ptr<transport::ShmNode> node, BufferOwnerPtr owner) {
  release_unused();
  std::lock_guard lock(kept_mutex_);
  kept_.push_back({std::move(node), std::move(owner)});
}

void Engine::release_unused() {
  std::lock_guard lock(kept_mutex_);
  std::erase_if(kept_, [](const Kept& kept) {
    transport::ShmNode& node = *kept.node;
    for (int position = 0; position < node.size(); ++position) {
      // A rank that has ended its use begins no other, since this rank has left.
      if (position != node.self() && node.is_used_by(position) && node.has_ended(position) != true) return false;
    }
    return true;
  });
}

std::shared_ptr<Group> Engine::add_group(Group::Options options, std::unique_ptr<transport::Mesh> mesh,
                                         std::unique_ptr<transport::Mesh> lane,
                                         std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes) {
  auto group =
      std::make_shared<Group>(*this, std::move(options), std::move(mesh), std::move(lane), std::move(fallback_meshes));
  std::lock_guard thread_lock(thread_mutex_);
  std::lock_guard lock(mutex_);
  release_unused();
  groups_.reserve(groups_.size() + 1);
  if (!thread_.joinable()) {
    stopping_ = false;
    wake_ = transport::make_event();
    timer_ = transport::make_timer();
    timer_armed_ = false;
    start_thread();
  }
  groups_.push_back(group);  // last: it cannot fail, and a group whose thread did not start is not here
  return group;
}

void Engine::remove_group(const std::shared_ptr<Group>& group) {
  group->end();
  release_unused();
  // Held until the thread has ended: add_group during that would reset stopping_.
  std::lock_guard thread_lock(thread_mutex_);
  std::thread ended;
  {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
    async_events.forget(group->id());
    if (groups_.empty() && thread_.joinable()) {
      stopping_ = true;
      signal(wake_);
      ended = std::move(thread_);
    }
  }
  if (ended.joinable()) ended.join();
}

void Engine::start_thread() {
  // Another thread handles the process's signals. Faults of the thread itself stay as they are.
  sigset_t blocked;
  sigset_t before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::wake() {
  std::lock_guard lock(mutex_);
  if (wake_) signal(wake_);
}

void Engine::wake_after_delay() {
  if (timer_armed_.exchange(true)) return;
  std::lock_guard lock(mutex_);
  if (timer_) set_timer(timer_, takeover_delay_ns_);
}

void Engine::run() {
  Round round;
  for (;;) {
    try {
      if (!run_once(round)) return;
    } catch (const std::bad_alloc&) {
      // The thread's own lists did not fit into memory. No group is in an intermediate state, so retry.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

bool Engine::progress_all(const std::vector<std::shared_ptr<Group>>& driven) {
  const std::int64_t now = now_ns();
  bool moved = false;
  for (const auto& group : driven) {
    // The thread may have released the group in the previous call, and a caller may drive it now.
    if (!group->driven_by_engine()) continue;
    moved |= group->progress(now);
    group->release_if_idle();
  }
  return moved;
}

bool Engine::run_once(Round& round) {
  auto& [driven, set, idle_since] = round;
  clear(wake_);
  const bool delay_is_over = clear(timer_);
  // The exchange reads what wake_after_delay wrote, so this round sees the work that armed the timer.
  if (delay_is_over) timer_armed_.exchange(false);
  driven.clear();
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    driven.reserve(groups_.size());
    for (const auto& group : groups_) {
      if (group->try_drive_by_engine()) driven.push_back(group);
    }
  }
  // Callers that wait for each of their transfers wake this thread for nothing: leave their transfers longer to them.
  if (delay_is_over) {
    takeover_delay_ns_ =
        driven.empty() ? std::min(2 * takeover_delay_ns_.load(), kMaxTakeoverDelayNs) : kTakeoverDelayNs;
  }
  if (progress_all(driven)) {
    idle_since = 0;
    return true;
  }
  const std::int64_t now = now_ns();
  std::int64_t spin_ns = 0;
  bool yields = false;
  for (const auto& group : driven) {
    if (!group->driven_by_engine()) continue;  // only the driver may look at active operations
    spin_ns = std::max(spin_ns, group->spin_ns());
    yields |= group->yields();
  }
  if (idle_since == 0) idle_since = now;
  if (!driven.empty() && now - idle_since < spin_ns) {
    pause(yields);
    return true;
  }
  set.clear();
  set.add(wake_.get(), POLLIN);
  set.add(timer_.get(), POLLIN);
  for (const auto& group : driven) group->add_to_engine_sleep(set);
  if (!set.look_again || !progress_all(driven)) {
    for (const auto& group : driven) group->set_engine_sleeps(true);
    sleep_until_ready(set);
  }
  for (const auto& group : driven) group->set_engine_sleeps(false);
  idle_since = 0;
  return true;
}

}  // namespace netfold::engine
