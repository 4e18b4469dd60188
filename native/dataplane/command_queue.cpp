#include "command_queue.hpp"

#include <utility>

namespace netfold::dataplane {

void CommandQueue::run(const std::function<void()>& command) {
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

void CommandQueue::serve() {
  for (;;) {
    std::packaged_task<void()> task;
    {
      std::lock_guard lock(mutex_);
      if (pending_.empty()) {
        has_pending_.store(false, std::memory_order_relaxed);
        return;
      }
      task = std::move(pending_.front());
      pending_.pop_front();
    }
    task();
  }
}

}  // namespace netfold::dataplane
