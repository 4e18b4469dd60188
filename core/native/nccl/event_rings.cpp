#include "event_rings.hpp"

#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <new>

namespace netfold::nccl {
namespace {

constexpr int kIdShift = 40;  // below it, a ring's count of events
// A load may be executed before the clock was read that stands before it.
constexpr std::int64_t kReorderedNs = 20'000;
// A thread that was stopped inside push holds the events of all threads back this long at most.
constexpr std::int64_t kLongestPushNs = 2'000'000'000;
constexpr std::size_t kMostHeld = std::size_t{1} << 20;

}  // namespace

// Gives the ring back when its thread ends. One recorder lives as long as the process, so that a thread has one ring.
struct EventRings::Claim {
  Ring* ring = nullptr;
  ~Claim() {
    if (ring != nullptr) ring->is_used.store(false, std::memory_order_release);
  }
};

EventRings::~EventRings() {
  for (auto& each : rings_) delete each.load();
}

EventRings::Ring* EventRings::ring() {
  thread_local Claim mine;
  if (mine.ring == nullptr) mine.ring = claim();
  return mine.ring;
}

EventRings::Ring* EventRings::claim() {
  for (std::size_t i = 0; i < kRings; ++i) {
    Ring* found = rings_[i].load(std::memory_order_acquire);
    if (found == nullptr) {
      auto* made = new (std::nothrow) Ring;
      if (made == nullptr) return nullptr;
      made->next_id = static_cast<std::uint64_t>(i + 1) << kIdShift;
      if (rings_[i].compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
      delete made;
    }
    bool is_used = false;
    if (found->is_used.compare_exchange_strong(is_used, true, std::memory_order_acq_rel)) return found;
  }
  return nullptr;
}

std::uint64_t EventRings::next_id() {
  Ring* own = ring();
  if (own == nullptr) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }
  return ++own->next_id;
}

bool EventRings::push(Event event) {
  Ring* own = ring();
  if (own == nullptr) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  // Sequentially consistent: no later read of the clock may come before it.
  own->busy.exchange(true, std::memory_order_seq_cst);
  event.at_ns = transport::now_ns();
  const std::uint64_t head = own->head.load(std::memory_order_relaxed);
  const std::uint64_t used = head - own->tail.load(std::memory_order_acquire);
  const bool has_place = used < kEvents;
  if (has_place) {
    own->events[head % kEvents] = event;
    own->head.store(head + 1, std::memory_order_release);
  } else {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  own->busy.store(false, std::memory_order_release);
  if (used == kEvents / 2) wake();
  return has_place;
}

std::vector<Event> EventRings::take(bool everything) {
  const std::int64_t now_ns = transport::now_ns();
  std::int64_t until_ns = now_ns - kReorderedNs;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (auto& each : rings_) {
    Ring* ring = each.load(std::memory_order_acquire);
    if (ring == nullptr) continue;
    if (ring->busy.load(std::memory_order_seq_cst)) {
      until_ns = std::min(until_ns, std::max(ring->idle_ns, now_ns - kLongestPushNs));
    } else {
      ring->idle_ns = now_ns - kReorderedNs;
    }
    const std::uint64_t head = ring->head.load(std::memory_order_acquire);
    std::uint64_t tail = ring->tail.load(std::memory_order_relaxed);
    for (; tail != head; ++tail) held_.push_back(ring->events[tail % kEvents]);
    ring->tail.store(tail, std::memory_order_release);
  }
  std::ranges::stable_sort(held_, {}, &Event::at_ns);
  auto end = held_.end();
  if (!everything && held_.size() < kMostHeld) end = std::ranges::upper_bound(held_, until_ns, {}, &Event::at_ns);
  std::vector<Event> taken(held_.begin(), end);
  held_.erase(held_.begin(), end);
  return taken;
}

}  // namespace netfold::nccl
