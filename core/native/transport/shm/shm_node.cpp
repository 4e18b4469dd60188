#include <fcntl.h>
#include <poll.h>
#include <netfold/transport/shm/shm_node.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace netfold::transport {
namespace {

struct flock lock_of(int position) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = position;
  lock.l_len = 1;
  return lock;
}

}  // namespace

ShmNode::Layout::Layout(int size) {
  const auto count = static_cast<std::size_t>(size);
  std::size_t end = sizeof(Segment);
  const auto place = [&](std::size_t bytes, std::size_t alignment) {
    const std::size_t begin = (end + alignment - 1) / alignment * alignment;
    end = begin + bytes;
    return begin;
  };
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kPage = 4096;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    taken[stream] = place(count * sizeof(std::uint64_t), kLine);
    asked[stream] = place(count * sizeof(std::uint64_t), kLine);
  }
  control_messages = place(count * sizeof(std::uint32_t), kLine);
  uses = place(count, kLine);
  awaits = place(count, kLine);
  cursors = place(count * sizeof(RingCursors), kLine);
  rings = place(count * kRingBytes, kPage);
  segment_bytes = place(0, kPage);
}

ShmNode::ShmNode(int self, std::vector<int> ranks, Fd memory, Fd socket, std::string name,
                 const ShmFdExchange::Token& token, std::shared_ptr<PeerMemory> peer_memory)
    : self_(self),
      ranks_(std::move(ranks)),
      layout_(size()),
      mapping_(Mapping::shared(memory.get(), layout_.node_bytes(size()))),
      fd_exchange_(std::move(socket), std::move(name), token, self),
      peer_memory_(std::move(peer_memory)) {
  if (!mapping_) throw_errno("map the memory that the ranks of this host share");
  header_ = static_cast<Header*>(static_cast<void*>(mapping_.data()));
  segments_ = mapping_.data() + sizeof(Header);
  for (int position = 0; position < size(); ++position) {
    fd_exchange_.add(rank(position), control_messages(self_, position), control_messages(position, self_));
  }
  // Locks belong to an open file, and all ranks were passed the same one.
  lock_ = ProcessFd(Fd(::open(("/proc/self/fd/" + std::to_string(memory.get())).c_str(), O_RDWR | O_CLOEXEC)));
  struct flock lock = lock_of(self_);
  if (lock_ && ::fcntl(lock_.get(), F_OFD_SETLK, &lock) == 0) own().has_lock.store(1, std::memory_order_release);
}

std::optional<bool> ShmNode::has_ended(int position) {
  if (!lock_ || segment(position).has_lock.load(std::memory_order_acquire) == 0) return std::nullopt;
  struct flock lock = lock_of(position);
  if (::fcntl(lock_.get(), F_OFD_GETLK, &lock) != 0) return std::nullopt;
  return lock.l_type == F_UNLCK;
}

std::byte* ShmNode::bounce(int position) {
  const std::size_t bytes = bounce_bytes();
  if (bounce_.empty()) bounce_.resize(bytes * static_cast<std::size_t>(size()));
  return bounce_.data() + bytes * static_cast<std::size_t>(position);
}

void ShmNode::publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.store(value, std::memory_order_release);
  ring_doorbell();
}

void ShmNode::ring_doorbell() {
  // Pairs with the fence of await(position): one of the two fences comes first. If this one does, the sleeper's last
  // check, after its fence, sees the counter that was stored before this fence. Else this rank sees the sleeper's bit.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int first = 0; first < size(); first += 64) {
    std::atomic<std::uint64_t>& sleepers = own().sleepers[first / 64];
    if (sleepers.load(std::memory_order_relaxed) == 0) continue;
    for (std::uint64_t waking = sleepers.exchange(0); waking != 0; waking &= waking - 1) {
      wake(first + std::countr_zero(waking));
    }
  }
}

void ShmNode::ring_all_doorbells() {
  // Pairs with the fence of prepare_sleep.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int first = 0; first < size(); first += 64) {
    std::uint64_t sleeping = asleep(first).load(std::memory_order_relaxed);
    if (self_ / 64 == first / 64) sleeping &= ~asleep_bit(self_);
    for (; sleeping != 0; sleeping &= sleeping - 1) wake(first + std::countr_zero(sleeping));
  }
}

void ShmNode::ring_doorbell(int position, short event) {
  // Pairs with the fence of `await` in the same way, with `awaits` in place of `asleep`, which was stored before it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool is_awaited = (awaits(position, self_).load(std::memory_order_relaxed) & event) != 0;
  if (event == POLLIN) {
    Segment& reader = segment(position);
    std::atomic<std::uint64_t>& writers = reader.writers[self_ / 64];
    if ((writers.load(std::memory_order_relaxed) & asleep_bit(self_)) == 0) {
      writers.fetch_or(asleep_bit(self_));
      // Pairs with the fence of await_bytes: the reader's last check sees this bit, or this rank sees `awaits_bytes`.
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    is_awaited |= reader.awaits_bytes.load(std::memory_order_relaxed) != 0;
  }
  if (!is_awaited) return;
  if ((asleep(position).load(std::memory_order_relaxed) & asleep_bit(position)) != 0) wake(position);
}

void ShmNode::wake(int position) {
  if ((asleep(position).fetch_and(~asleep_bit(position)) & asleep_bit(position)) != 0) fd_exchange_.ring(position);
}

void ShmNode::prepare_sleep() {
  for (const int position : awaited_) awaits(self_, position).store(0, std::memory_order_relaxed);
  awaited_.clear();
  own().awaits_bytes.store(0, std::memory_order_relaxed);
  sleep_prepared_ = true;
  asleep(self_).fetch_or(asleep_bit(self_), std::memory_order_relaxed);
  // Pairs with the fence of ring_all_doorbells: this rank's last check, after the fence, sees what the ringing rank stored
  // before, or that rank sees `asleep`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::await(int position) {
  // Stored after `asleep`, which `wake` reads after this bit.
  segment(position).sleepers[self_ / 64].fetch_or(asleep_bit(self_));
  // Pairs with the fence of ring_doorbell().
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::await(int position, short events) {
  awaited_.push_back(position);
  awaits(self_, position).store(static_cast<std::uint8_t>(events), std::memory_order_relaxed);
  // Pairs with the fence of ring_doorbell(position, event): this rank's last check sees that rank's bytes, or that rank
  // sees `awaits`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::await_bytes() {
  own().awaits_bytes.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmNode::cancel_sleep() {
  // Sleeps that no rank ended, until the doorbells are cleared nevertheless: a message about a region, or a ring that
  // came after the last sleep, would end every further sleep at once.
  constexpr unsigned kSleepsWithoutRing = 8;
  if (!sleep_prepared_) return;
  sleep_prepared_ = false;
  const bool is_rung = (asleep(self_).fetch_and(~asleep_bit(self_)) & asleep_bit(self_)) == 0;
  if (!is_rung && ++sleeps_without_ring_ < kSleepsWithoutRing) return;
  sleeps_without_ring_ = 0;
  fd_exchange_.clear();
}

bool ShmNode::begin_use(int owner) {
  uses(self_, owner).store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (segment(owner).left.load(std::memory_order_acquire) == kHere) return true;
  end_use(owner);
  return false;
}

int ShmNode::begin_use_of_all() {
  for (int owner = 0; owner < size(); ++owner) {
    if (owner != self_) uses(self_, owner).store(1, std::memory_order_relaxed);
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
  ring_all_doorbells();
}

}  // namespace netfold::transport
