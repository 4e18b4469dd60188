// Commands of other threads to the data plane's thread.
#pragma once

#include <netfold/transport/socket.hpp>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <utility>

namespace netfold::dataplane {

class CommandQueue {
 public:
  // Runs `command` on the serving thread and waits for its end; throws what the command threw.
  void run(const std::function<void()>& command) {
    std::packaged_task<void()> task(std::ref(command));
    std::future<void> done = task.get_future();
    {
      std::lock_guard lock(mutex_);
      pending_.push_back(std::move(task));
      has_pending_.store(true, std::memory_order_relaxed);
    }
    wake();
    done.get();
  }
  // Makes fd() readable; from any thread.
  void wake() { signal(wake_); }

  // For the serving thread. A descriptor that is readable after `run` or `wake`, until clear_wake().
  int fd() const { return wake_.get(); }
  void clear_wake() { clear(wake_); }
  bool has_pending() const { return has_pending_.load(std::memory_order_relaxed); }
  void serve() {
    for (;;) {
      std::packaged_task<void()> task;
      {
        std::lock_guard lock(mutex_);
        if (pending_.empty()) return has_pending_.store(false, std::memory_order_relaxed);
        task = std::move(pending_.front());
        pending_.pop_front();
      }
      task();
    }
  }

 private:
  transport::Fd wake_ = transport::make_event();
  std::mutex mutex_;
  std::deque<std::packaged_task<void()>> pending_;
  std::atomic<bool> has_pending_{false};  // written under the mutex; a hint, so that the data path takes no lock
};

}  // namespace netfold::dataplane
