// Memory that the ranks of one node share, and a bell for each to be woken by.
//
// Every rank owns one segment and maps those of the others. Only its owner writes to a segment (but for the `asleep`
// flag, which whoever rings takes down), so no location has two writers and no lock is needed. What a rank says is in
// the order it is said: values first, then the counter that announces them.
//
//   post     what a rank announces of one call, with its data where they are few; kPosts of them, used in turn
//   stream   a ring of kSlots slots of kSlotBytes for what is long; one for values that readers fold, one for values
//            that they copy
//   tag      how far a rank has come in a stream: (call << 24) + rounds within the call, so that it only ever grows
//   ring     of bytes to one other rank, for messages between the two: ShmPipe. A ring that is not used costs
//            addresses, no memory
//
// Segments are anonymous (memfd), so they need no room in /dev/shm and leave nothing behind; they are sealed against
// shrinking, so nobody can take pages away under a reader. Absent on purpose: any idea of what the bytes mean.
#pragma once

#include <netfold/transport/shm/peer_memory.hpp>
#include <netfold/transport/shm/shm_fd_exchange.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace netfold::transport {

class ShmNode {
 public:
  // More ranks of one machine than this are several nodes.
  static constexpr int kMaxSize = 64;
  static constexpr std::size_t kAnnouncementBytes = 48;
  static constexpr std::size_t kPostBytes = 16 << 10;
  static constexpr std::uint64_t kPosts = 4;
  // A slot fits the L2 cache of current cores beside the part of the tensor that it is copied from.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::uint64_t kSlots = 8;
  static constexpr std::uint64_t kMaxRounds = (1 << 24) - 1;
  static constexpr std::size_t kRingBytes = 1 << 20;  // a power of two

  // The first line holds the announcement and eight bytes of data: a scalar costs one cache miss a reader.
  struct alignas(64) Post {
    std::atomic<std::uint64_t> call;  // written last
    std::byte announcement[kAnnouncementBytes];
    std::byte data[kPostBytes];
  };
  struct Stream {
    alignas(64) std::atomic<std::uint64_t> published;        // tag
    alignas(64) std::atomic<std::uint64_t> taken[kMaxSize];  // tags: how far the owner has come in others' streams
    alignas(64) std::atomic<std::uint64_t> asked[kMaxSize];  // calls: the owner wants slots, and cannot read a buffer
    alignas(4096) std::byte slots[kSlots][kSlotBytes];
  };
  // Of the owner and one other rank. Counted from the beginning, so these only ever grow.
  struct RingCursors {
    alignas(64) std::atomic<std::uint64_t> written;  // bytes into the owner's ring to the other
    alignas(64) std::atomic<std::uint64_t> read;     // bytes out of the other's ring to the owner
  };
  struct Segment {
    alignas(64) std::atomic<std::uint32_t> asleep;
    alignas(64) std::atomic<std::uint32_t> left;  // Left
    std::int32_t fault_rank;
    std::uint32_t expired_call;  // the collective whose deadline passed, 0 for none, and its timeout
    std::int64_t expired_timeout_ns;
    std::uint32_t reason_bytes;
    char reason[1024];
    alignas(64) std::atomic<std::uint64_t> done;           // calls that this rank is through with
    alignas(64) std::atomic<std::uint8_t> uses[kMaxSize];  // 1: the owner touches memory of that rank's process
    alignas(64)
        std::atomic<std::uint32_t> control_messages[kMaxSize];  // that the owner has sent to that rank (ShmFdExchange)
    Post posts[kPosts];
    Stream to_reduce;
    Stream to_copy;
    alignas(64) std::atomic<std::uint8_t> awaits[kMaxSize];  // POLLIN, POLLOUT: of whose ring, while asleep
    RingCursors ends[kMaxSize];
    alignas(4096) std::byte rings[kMaxSize][kRingBytes];
  };

  // `ranks[p]` is the rank of position p, ascending; `segments[p]` and `doorbells[p]` its memfd of sizeof(Segment) zero
  // bytes and its eventfd, this rank's own included; `links[p]` a connected local stream socket to it, empty for this
  // rank. Takes ownership. `memory`: where every rank of the node has met every other; else null. Throws
  // std::system_error.
  ShmNode(int self, std::vector<int> ranks, std::vector<Fd> segments, std::vector<Fd> doorbells, std::vector<Fd> links,
          std::shared_ptr<PeerMemory> memory);
  ~ShmNode();
  ShmNode(const ShmNode&) = delete;
  ShmNode& operator=(const ShmNode&) = delete;

  int self() const { return self_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int rank(int position) const { return ranks_[static_cast<std::size_t>(position)]; }
  Segment& segment(int position) { return *segments_[static_cast<std::size_t>(position)]; }
  Segment& own() { return segment(self_); }
  Post& post(int position, std::uint64_t call) { return segment(position).posts[call % kPosts]; }

  // Calls are counted from 1; every rank of the node makes the same ones.
  std::uint64_t next_call() { return ++calls_; }
  // The last call in which this rank wrote to its streams: its slots are free once the others are through with it.
  std::uint64_t last_stream_call() const { return last_stream_call_; }
  void set_last_stream_call(std::uint64_t call) { last_stream_call_ = call; }

  // Makes what was written visible and wakes the others where they sleep.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value);
  void ring_doorbell();
  // As `ring`, for one rank: only where it sleeps and awaits `event` (POLLIN, POLLOUT) of the ring between us.
  void ring_doorbell(int position, short event);
  // Says that this rank is about to sleep until its bell rings; look once more after this.
  void prepare_sleep();
  // While it lies: also for `events` of the ring between it and that rank. Look once more after this.
  void await(int position, short events);
  // Awake again, whatever the reason.
  void cancel_sleep();
  int doorbell() const { return doorbells_[static_cast<std::size_t>(self_)].get(); }

  ShmFdExchange& fd_exchange() { return fd_exchange_; }
  // Null where some rank of the node cannot read another's memory: alike on all of them.
  PeerMemory* memory() const { return memory_.get(); }

  // The lease of memory that another rank's post refers to: its tensors, mapped or read from its process. It holds
  // while that rank is here. Who touches such memory begins a use and ends it a piece later; `leave` revokes the lease,
  // and the rank that left waits until nobody uses its memory before its user has it back. The two sides cannot miss
  // each other: one writes `uses` and then reads `left`, the other the other way round, with a full fence between.
  //
  // False: revoked, and nothing may be touched.
  bool begin_use(int owner);
  void end_use(int owner) { own().uses[owner].store(0, std::memory_order_release); }
  // Of all other ranks at once; the position of one that has left, -1 where all are here.
  int begin_use_of_all();
  void end_use_of_all();
  // After `leave`: whether that rank touches this rank's memory.
  bool is_used_by(int position) { return segment(position).uses[self_].load(std::memory_order_acquire) != 0; }

  // What `Segment::left` says. Who leaves in order is missed only by those who still wait for it.
  enum Left : std::uint32_t { kHere = 0, kFailed = 1, kLeft = 2 };
  // Tells the others why this rank gives up or leaves, once. `fault_rank`: -1 where nobody knows. `expired_call`: the
  // collective whose deadline passed, with its timeout; 0 where that is not why.
  void leave(Left how, int fault_rank, const std::string& reason, std::uint32_t expired_call = 0,
             std::int64_t expired_timeout_ns = 0);

 private:
  void wake(int position);

  int self_;
  std::vector<int> ranks_;
  std::vector<Segment*> segments_;
  std::vector<Fd> doorbells_;
  ShmFdExchange fd_exchange_;
  std::shared_ptr<PeerMemory> memory_;
  bool sleep_prepared_ = false;
  std::uint64_t calls_ = 0;
  std::uint64_t last_stream_call_ = 0;
};

}  // namespace netfold::transport
