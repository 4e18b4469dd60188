#include <sys/mman.h>
#include <unistd.h>
#include <netfold/transport/shm/shm_node.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::transport {

ShmNode::ShmNode(int self, std::vector<int> ranks, std::vector<Fd> segments, std::vector<Fd> doorbells,
                 std::vector<Fd> links, std::shared_ptr<PeerMemory> memory)
    : self_(self), ranks_(std::move(ranks)), doorbells_(std::move(doorbells)), memory_(std::move(memory)) {
  segments_.reserve(ranks_.size());
  for (const Fd& fd : segments) {
    void* mapped = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (mapped == MAP_FAILED) {
      for (Segment* made : segments_) munmap(made, sizeof(Segment));
      throw_errno("map a rank's shared memory");
    }
    segments_.push_back(static_cast<Segment*>(mapped));
  }
  for (int position = 0; position < size(); ++position) {
    fd_exchange_.add(std::move(links[static_cast<std::size_t>(position)]), own().control_messages[position],
                     segment(position).control_messages[self_]);
  }
}

ShmNode::~ShmNode() {
  for (Segment* segment : segments_) munmap(segment, sizeof(Segment));
}

void ShmNode::publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.store(value, std::memory_order_release);
  ring_doorbell();
}

void ShmNode::ring_doorbell() {
  // Pairs with the fence of prepare_sleep: of two such fences one comes first. If ours, the sleeper's last look, after its
  // fence, sees the counter that was stored before ours. If the sleeper's, `wake` below sees its `asleep`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int position = 0; position < size(); ++position) {
    if (position != self_) wake(position);
  }
}

void ShmNode::ring_doorbell(int position, short event) {
  // Pairs with the fence of `await`, as above: `awaits` takes the place of `asleep`, which was stored before it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const auto& awaits = segment(position).awaits[self_];
  if ((awaits.load(std::memory_order_relaxed) & event) != 0) wake(position);
}

void ShmNode::wake(int position) {
  auto& asleep = segment(position).asleep;
  if (asleep.load(std::memory_order_relaxed) == 0 || asleep.exchange(0) == 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(doorbells_[static_cast<std::size_t>(position)].get(), &one, sizeof one);
}

void ShmNode::prepare_sleep() {
  for (auto& events : own().awaits) events.store(0, std::memory_order_relaxed);
  sleep_prepared_ = true;
  own().asleep.store(1, std::memory_order_relaxed);
  // Pairs with the fence of `ring`: our last look, after this, sees what was published, or the publisher sees `asleep`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::await(int position, short events) {
  own().awaits[position].store(static_cast<std::uint8_t>(events), std::memory_order_relaxed);
  // Pairs with the fence of ring(position, event): that rank's bytes are seen in the last look, or our `awaits` by it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::cancel_sleep() {
  if (!sleep_prepared_) return;
  sleep_prepared_ = false;
  if (own().asleep.exchange(0) != 0) return;
  // Somebody rang, or is about to: what is left in the bell costs one look too many.
  std::uint64_t value = 0;
  [[maybe_unused]] const auto got = ::read(doorbell(), &value, sizeof value);
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
  Segment& mine = own();
  if (mine.left.load(std::memory_order_relaxed) != kHere) return;
  mine.fault_rank = fault_rank;
  mine.expired_call = expired_call;
  mine.expired_timeout_ns = expired_timeout_ns;
  mine.reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof mine.reason));
  std::memcpy(mine.reason, reason.data(), mine.reason_bytes);
  mine.left.store(how, std::memory_order_release);
  ring_doorbell();
}

}  // namespace netfold::transport
