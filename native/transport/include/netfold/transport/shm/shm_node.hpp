// The memory that the ranks of one node share, and a doorbell to wake each rank.
//
// Every rank owns one segment and maps the segments of the others. Only the owner writes to a segment, so no location
// has two writers and no lock is needed. The exception is the `asleep` flag, which a waking rank clears. A rank writes
// values first, then the counter that publishes them.
//
//   post     a rank's announcement of one call, with the data where they are few; kPosts of them, used in turn
//   stream   a ring of kSlots slots of kSlotBytes for long data; one stream for values that readers reduce, one for values
//            that readers copy
//   tag      how far a rank has come in a stream: (call << 24) + rounds within the call, so that it only ever grows
//   ring     bytes to one other rank, for messages between the two (ShmPipe). An unused ring costs addresses, no memory
//
// Segments are anonymous (memfd), so they take no space in /dev/shm and leave no file behind. They are sealed against
// shrinking, so no process can take pages away from a reader. Deliberately absent: any interpretation of the bytes.
#pragma once

#include <netfold/transport/mapping.hpp>
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
  // A machine with more ranks is divided into several nodes.
  static constexpr int kMaxSize = 64;
  static constexpr std::size_t kAnnouncementBytes = 48;
  static constexpr std::size_t kPostBytes = 16 << 10;
  static constexpr std::uint64_t kPosts = 4;
  // A slot fits into the L2 cache of current cores together with the part of the tensor that is copied to it.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::uint64_t kSlots = 8;
  static constexpr std::size_t kRingBytes = 1 << 20;  // a power of two

  // The first cache line holds the announcement and 8 bytes of data: a scalar costs each reader one cache miss.
  struct alignas(64) Post {
    std::atomic<std::uint64_t> call;  // written last
    std::byte announcement[kAnnouncementBytes];
    std::byte data[kPostBytes];
  };
  struct Stream {
    alignas(64) std::atomic<std::uint64_t> published;        // tag
    alignas(64) std::atomic<std::uint64_t> taken[kMaxSize];  // tags: how far the owner has read the others' streams
    alignas(
        64) std::atomic<std::uint64_t> asked[kMaxSize];  // calls: the owner needs slots, since it cannot read a buffer
    alignas(4096) std::byte slots[kSlots][kSlotBytes];
  };
  // Of the owner and one other rank. Both count all bytes ever, so they only grow.
  struct RingCursors {
    alignas(64) std::atomic<std::uint64_t> written;  // bytes into the owner's ring to the other
    alignas(64) std::atomic<std::uint64_t> read;     // bytes out of the other's ring to the owner
  };
  struct Segment {
    alignas(64) std::atomic<std::uint32_t> asleep;
    alignas(64) std::atomic<std::uint32_t> left;  // Left
    std::int32_t fault_rank;
    std::uint32_t expired_call;  // the collective whose deadline passed; 0 for none
    std::int64_t expired_timeout_ns;
    std::uint32_t reason_bytes;
    char reason[1024];
    alignas(64) std::atomic<std::uint64_t> done;           // the last call that the owner has finished
    alignas(64) std::atomic<std::uint8_t> uses[kMaxSize];  // 1: the owner touches memory of that rank's process
    alignas(64) std::atomic<std::uint32_t> control_messages[kMaxSize];  // sent to that rank by ShmFdExchange
    Post posts[kPosts];
    Stream to_reduce;
    Stream to_copy;
    alignas(64) std::atomic<std::uint8_t> awaits[kMaxSize];  // events of that rank's ring that end the sleep
    RingCursors ends[kMaxSize];
    alignas(4096) std::byte rings[kMaxSize][kRingBytes];
  };

  // Takes ownership of the descriptors. Throws std::system_error.
  // self: this rank's position.
  // ranks: by position, ascending.
  // segments: by position, the memfd of sizeof(Segment) zero bytes, this rank's own included.
  // doorbells: by position, the eventfd, this rank's own included.
  // links: by position, a connected local stream socket; empty for this rank.
  // memory: null unless every rank of the node has probed every other.
  ShmNode(int self, std::vector<int> ranks, std::vector<Fd> segments, std::vector<Fd> doorbells, std::vector<Fd> links,
          std::shared_ptr<PeerMemory> memory);
  ShmNode(const ShmNode&) = delete;
  ShmNode& operator=(const ShmNode&) = delete;

  int self() const { return self_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int rank(int position) const { return ranks_[static_cast<std::size_t>(position)]; }
  Segment& segment(int position) {
    return *static_cast<Segment*>(static_cast<void*>(segments_[static_cast<std::size_t>(position)].data()));
  }
  Segment& own() { return segment(self_); }
  Post& post(int position, std::uint64_t call) { return segment(position).posts[call % kPosts]; }

  // Calls are counted from 1; every rank of the node makes the same calls.
  std::uint64_t next_call() { return ++calls_; }
  // The last call in which this rank wrote to its streams. Its slots are free once the others have finished that call.
  std::uint64_t last_stream_call() const { return last_stream_call_; }
  void set_last_stream_call(std::uint64_t call) { last_stream_call_ = call; }

  // Makes earlier writes visible, sets the counter and wakes the other ranks that sleep.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value);
  void ring_doorbell();
  // Wakes one rank, only where it sleeps and awaits `event` (POLLIN, POLLOUT) of the ring between the two ranks.
  void ring_doorbell(int position, short event);
  // Announces that this rank will sleep until its doorbell is readable. Check once more for events after this call.
  void prepare_sleep();
  // After prepare_sleep: wake also for `events` of the ring to that rank. Check once more for events after this call.
  void await(int position, short events);
  // Ends the sleep, or gives it up, for any reason.
  void cancel_sleep();
  int doorbell() const { return doorbells_[static_cast<std::size_t>(self_)].get(); }

  ShmFdExchange& fd_exchange() { return fd_exchange_; }
  // Null where any rank of the node cannot read another's memory; the same on all ranks.
  PeerMemory* memory() const { return memory_.get(); }

  // The lease of memory that another rank's post refers to: its tensors, mapped or read from its process. The lease is
  // valid while that rank takes part. A rank begins a use before it touches such memory, and ends the use one chunk
  // later. `leave` revokes the lease; the leaving rank returns its memory to the user only once no rank uses it. The
  // two
  // sides cannot miss each other: one writes `uses` and then reads `left`, the other writes `left` and then reads
  // `uses`, with a full fence between.
  //
  // False: the lease is revoked, and the memory must not be touched.
  bool begin_use(int owner);
  void end_use(int owner) { own().uses[owner].store(0, std::memory_order_release); }
  // Begins a use of all other ranks at once. Returns the position of a rank that has left, -1 where none has.
  int begin_use_of_all();
  void end_use_of_all();
  // After `leave`: whether that rank still uses this rank's memory.
  bool is_used_by(int position) { return segment(position).uses[self_].load(std::memory_order_acquire) != 0; }

  // The values of `Segment::left`. A rank that leaves in order (kLeft) fails only ranks that still wait for it.
  enum Left : std::uint32_t { kHere = 0, kFailed = 1, kLeft = 2 };
  // Tells the other ranks once why this rank fails or leaves.
  // fault_rank: the rank at fault; -1 where it is unknown.
  // expired_call: the collective whose deadline passed, with its timeout; 0 for another reason.
  void leave(Left how, int fault_rank, const std::string& reason, std::uint32_t expired_call = 0,
             std::int64_t expired_timeout_ns = 0);

 private:
  void wake(int position);

  int self_;
  std::vector<int> ranks_;
  std::vector<Mapping> segments_;
  std::vector<Fd> doorbells_;
  ShmFdExchange fd_exchange_;
  std::shared_ptr<PeerMemory> memory_;
  bool sleep_prepared_ = false;
  std::uint64_t calls_ = 0;
  std::uint64_t last_stream_call_ = 0;
};

}  // namespace netfold::transport
