// Commands of other threads to the data plane's thread.
#pragma once

#include <netfold/transport/socket.hpp>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <mutex>

namespace netfold::dataplane {

class CommandQueue {
 public:
  // Runs `command` on the serving thread and waits for its end; throws what the command threw.
  void run(const std::function<void()>& command);
  // Makes fd() readable; from any thread.
  void wake() { signal(wake_); }

  // For the serving thread. A descriptor that is readable after `run` or `wake`, until clear_wake().
  int fd() const { return wake_.get(); }
  void clear_wake() { clear(wake_); }
  bool has_pending() const { return has_pending_.load(std::memory_order_relaxed); }
  void serve();

 private:
  transport::Fd wake_ = transport::make_event();
  std::mutex mutex_;
  std::deque<std::packaged_task<void()>> pending_;
  std::atomic<bool> has_pending_{false};  // written under the mutex; a hint, so that the data path takes no lock
};

}  // namespace netfold::dataplane
