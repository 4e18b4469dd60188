// A submitted call: its caller waits for it, and the driver of its group runs it.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/engine/event.hpp>
#include <netfold/transport/condition.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace netfold::engine {

// Keeps the buffers of an operation allocated until the engine has finished with them.
class BufferOwner {
 public:
  // Called once, when nothing touches the buffers any more: on any thread, with locks of the engine held, perhaps after
  // the end of the interpreter that the object belongs to. Must not wait.
  virtual void release() noexcept = 0;

 protected:
  ~BufferOwner() = default;
};
struct ReleaseOwner {
  void operator()(BufferOwner* owner) const noexcept { owner->release(); }
};
using BufferOwnerPtr = std::unique_ptr<BufferOwner, ReleaseOwner>;

class Operation {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Wait up to `timeout_ns`; -1 waits until the operation is done, at its own deadline at the latest. True: done.
  bool wait(std::int64_t timeout_ns) const;
  // Ask for the id in the engine's completion queue when the operation is done. False: done already, nothing is queued.
  bool notify();
  std::uint64_t id() const { return id_; }
  // Valid after done().
  const collective::Failure& failure() const { return failure_; }
  const EventRecord& record() const { return record_; }
  // The other rank of a send or receive. A receive from any source knows its sender after done().
  int peer() const { return call_.root; }

 private:
  friend class Group;
  friend class StatusPublisher;
  friend class Transfers;
  // Name rank, call, call site and time since submission: the beginning of an error text.
  std::string describe(int rank) const;
  // The same for a timeout: the text goes on with its reason.
  std::string describe_timeout(int rank) const;
  std::string call_and_site(int rank) const;

  BufferOwnerPtr owner_;  // of the call's buffers; null where the submitter keeps them, or the operation is done
  collective::Call call_;
  std::uint64_t id_ = 0;
  std::int64_t timeout_ns_ = 0;
  std::int64_t deadline_ns_ = 0;  // from the submission; -1: none
  const char* site_ = nullptr;    // where the call was made, if known; the text is never freed
  EventRecord record_;
  collective::Failure failure_;
  std::unique_ptr<collective::Algorithm> algorithm_;
  std::atomic<bool> done_{false};
  bool notify_ = false;
  bool updates_shares_ = false;   // the next split operation is cut by the rates of this one
  bool in_grace_period_ = false;  // past its deadline, waiting to hear which rank is at fault
  mutable std::mutex mutex_;
  mutable transport::Condition condition_;
};

}  // namespace netfold::engine
