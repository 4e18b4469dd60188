#include <netfold/transport/shm/shm_node.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::transport {

ShmNode::ShmNode(int self, std::vector<int> ranks, std::vector<Fd> segments, std::vector<Fd> doorbells,
                 std::vector<Fd> links, std::shared_ptr<PeerMemory> memory)
    : self_(self), ranks_(std::move(ranks)), doorbells_(std::move(doorbells)), memory_(std::move(memory)) {
  segments_.reserve(ranks_.size());
  for (const Fd& fd : segments) {
    segments_.push_back(Mapping::shared(fd.get(), sizeof(Segment)));
    if (!segments_.back()) throw_errno("map a rank's shared memory");
  }
  for (int position = 0; position < size(); ++position) {
    fd_exchange_.add(std::move(links[static_cast<std::size_t>(position)]), own().control_messages[position],
                     segment(position).control_messages[self_]);
  }
}

void ShmNode::publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.store(value, std::memory_order_release);
  ring_doorbell();
}

void ShmNode::ring_doorbell() {
  // Pairs with the fence of prepare_sleep: one of the two fences comes first. If this one does, the sleeper's last
  // check, after its fence, sees the counter that was stored before this fence. Else `wake` below sees the sleeper's
  // `asleep`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int position = 0; position < size(); ++position) {
    if (position != self_) wake(position);
  }
}

void ShmNode::ring_doorbell(int position, short event) {
  // Pairs with the fence of `await` in the same way, with `awaits` in place of `asleep`, which was stored before it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const auto& awaits = segment(position).awaits[self_];
  if ((awaits.load(std::memory_order_relaxed) & event) != 0) wake(position);
}

void ShmNode::wake(int position) {
  auto& asleep = segment(position).asleep;
  if (asleep.load(std::memory_order_relaxed) == 0 || asleep.exchange(0) == 0) return;
  signal(doorbells_[static_cast<std::size_t>(position)]);
}

void ShmNode::prepare_sleep() {
  for (auto& events : own().awaits) events.store(0, std::memory_order_relaxed);
  sleep_prepared_ = true;
  own().asleep.store(1, std::memory_order_relaxed);
  // Pairs with the fence of ring_doorbell(): this rank's last check, after the fence, sees the published counter, or
  // the publisher sees `asleep`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::await(int position, short events) {
  own().awaits[position].store(static_cast<std::uint8_t>(events), std::memory_order_relaxed);
  // Pairs with the fence of ring_doorbell(position, event): this rank's last check sees that rank's bytes, or that rank
  // sees `awaits`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::cancel_sleep() {
  if (!sleep_prepared_) return;
  sleep_prepared_ = false;
  if (own().asleep.exchange(0) != 0) return;
  // Another rank wrote to the doorbell, or is about to. A value that stays in the doorbell costs one needless check.
  clear(doorbells_[static_cast<std::size_t>(self_)]);
}

bool ShmNode::begin_use(int owner) {
  own().uses[owner].store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (segment(owner).left.load(std::memory_order_acquire) == kHere) return true;
  end_use(owner);
  return false;
}

int ShmNode::begin_use_of_all() {
  for (int owner = 0; owner < size(); ++owner) {
    if (owner != self_) own().uses[owner].store(1, std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int owner = 0; owner < size(); ++owner) {
    if (owner == self_ || segment(owner).left.load(std::memory_order_acquire) == kHere) continue;
    end_use_of_all();
    return owner;
  }
  return -1;
}

void ShmNode::end_use_of_all() {
  for (int owner = 0; owner < size(); ++owner) {
    if (owner != self_) end_use(owner);
  }
}

void ShmNode::leave(Left how, int fault_rank, const std::string& reason, std::uint32_t expired_call,
                    std::int64_t expired_timeout_ns) {
  Segment& segment = own();
  if (segment.left.load(std::memory_order_relaxed) != kHere) return;
  segment.fault_rank = fault_rank;
  segment.expired_call = expired_call;
  segment.expired_timeout_ns = expired_timeout_ns;
  segment.reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof segment.reason));
  std::memcpy(segment.reason, reason.data(), segment.reason_bytes);
  segment.left.store(how, std::memory_order_release);
  ring_doorbell();
}

}  // namespace netfold::transport
