#include <pthread.h>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <chrono>
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

std::shared_ptr<Group> Engine::add_group(Group::Options options, std::unique_ptr<transport::Mesh> mesh,
                                         std::unique_ptr<transport::Mesh> lane,
                                         std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes) {
  auto group =
      std::make_shared<Group>(*this, std::move(options), std::move(mesh), std::move(lane), std::move(fallback_meshes));
  std::lock_guard thread_lock(thread_mutex_);
  std::lock_guard lock(mutex_);
  groups_.push_back(group);
  if (!thread_.joinable()) {
    stopping_ = false;
    wake_ = transport::make_event();
    timer_ = transport::make_timer();
    timer_armed_ = false;
    thread_ = std::thread([this] { run(); });
  }
  return group;
}

void Engine::remove_group(const std::shared_ptr<Group>& group) {
  group->end();
  // Held until the thread has ended: add_group during that would reset stopping_.
  std::lock_guard thread_lock(thread_mutex_);
  std::thread ended;
  {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
    if (groups_.empty() && thread_.joinable()) {
      stopping_ = true;
      signal(wake_);
      ended = std::move(thread_);
    }
  }
  if (ended.joinable()) ended.join();
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
