// The engine of a process: the thread that drives groups whose callers do not, and the queues for Python's threads.
#pragma once

#include <netfold/engine/group.hpp>
#include <netfold/transport/condition.hpp>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace netfold::engine {

// An event that a thread above the engine should handle.
struct AsyncEvent {
  enum class Kind : std::uint8_t {
    unused = 0,       // a connection to `ranks[0]` is used that was not made yet
    broken = 1,       // a connection to `ranks[0]` broke and can be reconnected
    overdue = 2,      // an operation waits for `ranks`, longer than usual
    unconnected = 3,  // a receive from any rank waits, and the idle connections to `ranks` were closed
  };
  Kind kind = Kind::broken;
  std::uint64_t group = 0;
  std::vector<int> ranks;
  int lane = 0;
  int rail = 0;
  std::uint32_t sequence = 0;
  std::int64_t waited_ns = 0;
};

// A queue between threads. Its user bounds it: each item may be in it once.
template <class Item>
class WaitQueue {
 public:
  void push(Item item) {
    std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    pushed_.notify_one();
  }
  // Take the oldest item. nullopt: none came within `timeout_ns`, or `interrupt` was called meanwhile.
  std::optional<Item> pop(std::int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    const std::uint64_t interrupts = interrupts_;
    pushed_.wait_until(lock, now_ns() + timeout_ns, [&] { return !items_.empty() || interrupts_ != interrupts; });
    if (items_.empty()) return std::nullopt;
    std::optional<Item> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }
  template <class Predicate>
  void remove_if(const Predicate& predicate) {
    std::lock_guard lock(mutex_);
    std::erase_if(items_, predicate);
  }
  // End every `pop` under way.
  void interrupt() {
    std::lock_guard lock(mutex_);
    ++interrupts_;
    pushed_.notify_all();
  }

 private:
  std::mutex mutex_;
  transport::Condition pushed_;
  std::deque<Item> items_;
  std::uint64_t interrupts_ = 0;
};

// The events that no thread has taken yet. Nothing repeats a request for a connection, so none may be dropped: each
// connection has at most one request of a kind here, and each group one event of another kind. So their number is
// bounded by that of the connections, also without a thread that takes them.
class AsyncEvents {
 public:
  // Add an event, or merge it with one about the same thing that is still here.
  void push(AsyncEvent event);
  // Take the oldest event. nullopt: none came within `timeout_ns`, `interrupt` was called, or the group has ended.
  std::optional<AsyncEvent> pop(std::int64_t timeout_ns);
  void forget(std::uint64_t group);
  void interrupt() { order_.interrupt(); }

 private:
  // Kind and group; of a connection also the rank, the lane and the rail.
  using Subject = std::tuple<AsyncEvent::Kind, std::uint64_t, int, int, int>;

  std::mutex mutex_;
  std::map<Subject, AsyncEvent> events_;
  WaitQueue<Subject> order_;
};

// The one engine of a process. The thread starts with the first group and ends with the last.
class Engine {
 public:
  static Engine& instance();
  // See Group::Group for the meshes.
  std::shared_ptr<Group> add_group(Group::Options options, std::unique_ptr<transport::Mesh> mesh,
                                   std::unique_ptr<transport::Mesh> lane,
                                   std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes);
  // Fail what is under way, wait until no thread drives the group, and forget the group.
  void remove_group(const std::shared_ptr<Group>& group);

  // Ids of completed operations that asked for a notification.
  WaitQueue<std::uint64_t> completions;
  AsyncEvents async_events;

  // Keep buffers of a failed group until no rank of the node that uses them is left: such a rank was stopped while it
  // read or wrote a chunk, and goes on with it when it continues.
  void keep(std::shared_ptr<transport::ShmNode> node, BufferOwnerPtr owner);

  // For groups and operations.
  std::uint64_t next_operation_id() { return next_operation_id_.fetch_add(1); }
  void wake();
  // Wake the thread after takeover_delay_ns_, unless an earlier call will.
  void wake_after_delay();

 private:
  // How long the engine thread leaves a transfer or a small operation to a caller that may be about to wait for it: a
  // hop between threads costs more. The delay doubles after each wake that found no work, up to the maximum.
  static constexpr std::int64_t kTakeoverDelayNs = 100'000;
  static constexpr std::int64_t kMaxTakeoverDelayNs = 800'000;
  explicit Engine(const Engine* of_parent) : of_parent_(of_parent) {}
  // Local to the engine thread, and kept between rounds so that a round allocates nothing.
  struct Round {
    std::vector<std::shared_ptr<Group>> driven;
    collective::WaitSet set;
    std::int64_t idle_since = 0;
  };
  void start_thread();
  // Release the buffers of `keep` that no rank uses any more. At each `keep`, and whenever a group is made or ends.
  void release_unused();
  void run();
  bool run_once(Round& round);  // false: the thread is to end
  static bool progress_all(const std::vector<std::shared_ptr<Group>>& driven);

  // The engine of the process that forked this one: still referenced, so that no leak checker reports it.
  [[maybe_unused]] const Engine* const of_parent_;
  std::mutex thread_mutex_;  // guards starting and joining thread_; taken before mutex_, never by the thread itself
  std::mutex mutex_;
  std::vector<std::shared_ptr<Group>> groups_;
  struct Kept {
    std::shared_ptr<transport::ShmNode> node;
    BufferOwnerPtr owner;
  };
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;  // at most the operations that were under way in failed groups
  std::thread thread_;
  bool stopping_ = false;
  transport::Fd wake_;
  transport::Fd timer_;
  std::atomic<bool> timer_armed_{false};
  std::atomic<std::int64_t> takeover_delay_ns_{kTakeoverDelayNs};
  std::atomic<std::uint64_t> next_operation_id_{1};
};

}  // namespace netfold::engine
