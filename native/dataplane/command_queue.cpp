#include "command_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace netfold::dataplane {

CommandQueue::CommandQueue() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_) transport::throw_errno("data plane: eventfd");
}

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

void CommandQueue::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

void CommandQueue::clear_wake() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
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
