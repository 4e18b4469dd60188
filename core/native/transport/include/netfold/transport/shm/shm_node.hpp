// The memory that the ranks of one node share, and the means to wake each rank.
//
// The memory is one memfd, which the lowest rank of the node makes. Every rank owns one segment of it. Only the owner
// writes to a segment, so no location has two writers and no lock is needed. The exceptions are the bits of sleeping
// ranks: a rank sets its bit in the header and in the segments of the ranks that shall wake it, and a waking rank clears
// them. A rank that writes to a ring sets its bit at the reader, which clears it. A rank writes values first, then the
// counter that publishes them.
//
//   post     a rank's announcement of one call, with the data where they are few; kPosts of them, used in turn
//   stream   a ring of kSlots slots of kSlotBytes for long data; one stream for values that readers reduce, one for values
//            that readers copy
//   tag      how far a rank has come in a stream: (call << 24) + rounds within the call, so that it only ever grows
//   ring     bytes to one other rank, for messages between the two (ShmPipe). An unused ring costs addresses, no memory
//
// The memory is anonymous, so it takes no space in /dev/shm and leaves no file behind. It is sealed against shrinking,
// so no process can take pages away from a reader. Deliberately absent: any interpretation of the bytes.
#pragma once

#include <netfold/transport/mapping.hpp>
#include <netfold/transport/shm/peer_memory.hpp>
#include <netfold/transport/shm/shm_fd_exchange.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace netfold::transport {

class ShmNode {
 public:
  // A machine with more ranks is divided into several nodes.
  static constexpr int kMaxSize = 256;
  static constexpr std::size_t kAnnouncementBytes = 48;
  static constexpr std::size_t kPostBytes = 16 << 10;
  static constexpr std::uint64_t kPosts = 4;
  // A slot fits into the L2 cache of current cores together with the part of the tensor that is copied to it.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::uint64_t kSlots = 8;
  static constexpr std::size_t kRingBytes = 1 << 20;  // a power of two
  // Bytes that are read at once from another rank's memory.
  static constexpr std::size_t kBounceLeast = 16 << 10;
  static constexpr std::size_t kBounceMost = 128 << 10;

  // The first cache line holds the announcement and 8 bytes of data: a scalar costs each reader one cache miss.
  struct alignas(64) Post {
    std::atomic<std::uint64_t> call;  // written last
    std::byte announcement[kAnnouncementBytes];
    std::byte data[kPostBytes];
  };
  enum class Stream : std::uint8_t { to_reduce, to_copy };
  static constexpr std::size_t kStreams = 2;
  // Of the owner and one other rank. Both count all bytes ever, so they only grow.
  struct RingCursors {
    alignas(64) std::atomic<std::uint64_t> written;  // bytes into the owner's ring to the other
    alignas(64) std::atomic<std::uint64_t> read;     // bytes out of the other's ring to the owner
  };
  // The part of a segment that is the same for any number of ranks. The parts with an entry for each rank follow.
  struct Segment {
    alignas(64) std::atomic<std::uint32_t> left;  // Left
    std::atomic<std::uint32_t> has_lock;          // 1: has_ended can tell the end of the owner's process
    std::int32_t fault_rank;
    std::uint32_t expired_call;  // the collective whose deadline passed; 0 for none
    std::int64_t expired_timeout_ns;
    std::uint32_t reason_bytes;
    char reason[1024];
    alignas(64) std::atomic<std::uint64_t> done;  // the last call that the owner has finished
    // Bit p % 64 of word p / 64: the next publication of the owner wakes the rank at position p.
    alignas(64) std::atomic<std::uint64_t> sleepers[kMaxSize / 64];
    // Likewise: the rank at position p has written to its ring to the owner, which takes the bits.
    alignas(64) std::atomic<std::uint64_t> writers[kMaxSize / 64];
    std::atomic<std::uint8_t> awaits_bytes;  // 1: bytes in any ring to the owner end its sleep
    Post posts[kPosts];
    struct alignas(64) Counter {
      std::atomic<std::uint64_t> tag;
    } published[kStreams];
    // Tag: 1 where the owner can access the other ranks' tensors of the call, 2 where it cannot.
    Counter access;
    alignas(4096) std::byte slots[kStreams][kSlots][kSlotBytes];
  };

  // The bytes of the memory that `size` ranks share.
  static std::size_t bytes(int size) { return Layout(size).node_bytes(size); }

  // Throws std::system_error.
  // self: this rank's position.
  // ranks: by position, ascending.
  // memory: the memfd, of at least bytes(ranks.size()) bytes, which were zero at first. Owned from here on.
  // socket, name, token: see ShmFdExchange.
  // peer_memory: null unless every rank of the node has probed every other.
  ShmNode(int self, std::vector<int> ranks, Fd memory, Fd socket, std::string name, const ShmFdExchange::Token& token,
          std::shared_ptr<PeerMemory> peer_memory);
  ShmNode(const ShmNode&) = delete;
  ShmNode& operator=(const ShmNode&) = delete;

  int self() const { return self_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int rank(int position) const { return ranks_[static_cast<std::size_t>(position)]; }
  Segment& segment(int position) { return *at<Segment>(position, 0); }
  Segment& own() { return segment(self_); }
  Post& post(int position, std::uint64_t call) { return segment(position).posts[call % kPosts]; }
  // Tag: the rounds that the owner has published.
  std::atomic<std::uint64_t>& published(Stream stream, int owner) {
    return segment(owner).published[static_cast<std::size_t>(stream)].tag;
  }
  std::atomic<std::uint64_t>& access(int owner) { return segment(owner).access.tag; }
  std::byte* slot(Stream stream, int owner, std::uint64_t round) {
    return segment(owner).slots[static_cast<std::size_t>(stream)][round % kSlots];
  }
  // Tag: how far the owner has read the other's stream.
  std::atomic<std::uint64_t>& taken(Stream stream, int owner, int other) {
    return at<std::atomic<std::uint64_t>>(owner, layout_.taken[static_cast<std::size_t>(stream)])[other];
  }
  // Call: the owner needs slots of the other, since it cannot read a buffer.
  std::atomic<std::uint64_t>& asked(Stream stream, int owner, int other) {
    return at<std::atomic<std::uint64_t>>(owner, layout_.asked[static_cast<std::size_t>(stream)])[other];
  }
  RingCursors& cursors(int owner, int other) { return at<RingCursors>(owner, layout_.cursors)[other]; }
  // The owner's ring to the other, of kRingBytes.
  std::byte* ring(int owner, int other) {
    return at<std::byte>(owner, layout_.rings) + static_cast<std::size_t>(other) * kRingBytes;
  }

  // Calls are counted from 1; every rank of the node makes the same calls.
  std::uint64_t next_call() { return ++calls_; }
  // A call that all ranks of the node are known to have finished.
  std::uint64_t finished_by_all() const { return finished_by_all_; }
  void set_finished_by_all(std::uint64_t call) { finished_by_all_ = call; }
  // The last call in which this rank wrote to its streams. Its slots are free once the others have finished that call.
  std::uint64_t last_stream_call() const { return last_stream_call_; }
  void set_last_stream_call(std::uint64_t call) { last_stream_call_ = call; }

  // Makes earlier writes visible, sets the counter and wakes the ranks that sleep and await this rank.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value);
  void ring_doorbell();
  // Wakes every rank that sleeps.
  void ring_all_doorbells();
  // After a change of the ring between the two ranks: POLLIN, bytes to that rank; POLLOUT, space for it. Wakes that rank,
  // only where it sleeps and awaits the event.
  void ring_doorbell(int position, short event);
  // Announces that this rank will sleep until one of `doorbells` is readable. Check once more for events afterwards.
  void prepare_sleep();
  // After prepare_sleep: wake once that rank publishes anything. Check once more for it after this call.
  void await(int position);
  // After prepare_sleep: wake also for `events` of the ring to that rank. Check once more for events after this call.
  void await(int position, short events);
  // After prepare_sleep: wake also for bytes in any ring to this rank. Check take_written once more after this call.
  void await_bytes();
  // Calls `handle` for the position of each rank that has written to its ring to this rank since the last call. So a
  // rank that receives from any rank looks at those rings only. Cost: four loads, whatever the number of ranks.
  template <class Handle>
  void take_written(const Handle& handle) {
    for (int first = 0; first < size(); first += 64) {
      std::atomic<std::uint64_t>& writers = own().writers[first / 64];
      if (writers.load(std::memory_order_relaxed) == 0) continue;
      std::uint64_t taken = writers.exchange(0);
      // Pairs with the first fence of ring_doorbell(position, event): a writer that found its bit set had written
      // before this fence.
      std::atomic_thread_fence(std::memory_order_seq_cst);
      for (; taken != 0; taken &= taken - 1) handle(first + std::countr_zero(taken));
    }
  }
  // Ends the sleep, or gives it up, for any reason.
  void cancel_sleep();
  std::array<int, 2> doorbells() const { return fd_exchange_.descriptors(); }

  ShmFdExchange& fd_exchange() { return fd_exchange_; }
  // Private memory of bounce_bytes() for each rank, for what is read from that rank's memory. All of it fits into the
  // L2 cache of current cores, unless there are many ranks. Its contents last until the next poll.
  std::size_t bounce_bytes() const {
    constexpr std::size_t kAll = 512 << 10;
    return std::clamp(kAll / static_cast<std::size_t>(std::max(1, size() - 1)) / 4096 * 4096, kBounceLeast,
                      kBounceMost);
  }
  std::byte* bounce(int position);
  // Null where any rank of the node cannot read another's memory; the same on all ranks.
  PeerMemory* memory() const { return peer_memory_.get(); }

  // The lease of memory that another rank's post refers to: its tensors, mapped or read from its process. The lease is
  // valid while that rank takes part. A rank begins a use before it touches such memory, and ends the use one chunk
  // later. `leave` revokes the lease; the leaving rank returns its memory to the user only once no rank uses it. The two
  // sides cannot miss each other: one writes `uses` and then reads `left`, the other writes `left` and then reads
  // `uses`, with a full fence between.
  //
  // False: the lease is revoked, and the memory must not be touched.
  bool begin_use(int owner);
  void end_use(int owner) { uses(self_, owner).store(0, std::memory_order_release); }
  // Begins a use of all other ranks at once. Returns the position of a rank that has left, -1 where none has.
  int begin_use_of_all();
  void end_use_of_all();
  // After `leave`: whether that rank still uses this rank's memory.
  bool is_used_by(int position) { return uses(position, self_).load(std::memory_order_acquire) != 0; }

  // Whether that rank's process has ended; nullopt where only a connection to it would show that. A system call.
  std::optional<bool> has_ended(int position);

  // The values of `Segment::left`. A rank that leaves in order (kLeft) fails only ranks that still wait for it.
  enum Left : std::uint32_t { kHere = 0, kFailed = 1, kLeft = 2 };
  // Tells the other ranks once why this rank fails or leaves.
  // fault_rank: the rank at fault; -1 where it is unknown.
  // expired_call: the collective whose deadline passed, with its timeout; 0 for another reason.
  void leave(Left how, int fault_rank, const std::string& reason, std::uint32_t expired_call = 0,
             std::int64_t expired_timeout_ns = 0);

 private:
  // Bit p % 64 of word p / 64: the rank at position p sleeps. All bits lie in one cache line, so that a rank that
  // publishes finds the sleeping ranks of any node by one look.
  struct alignas(4096) Header {
    std::atomic<std::uint64_t> asleep[kMaxSize / 64];
  };
  // The places in a segment of the parts that have an entry for each rank.
  struct Layout {
    explicit Layout(int size);
    std::size_t node_bytes(int size) const { return sizeof(Header) + static_cast<std::size_t>(size) * segment_bytes; }

    std::size_t taken[kStreams];
    std::size_t asked[kStreams];
    std::size_t control_messages;
    std::size_t uses;
    std::size_t awaits;
    std::size_t cursors;
    std::size_t rings;
    std::size_t segment_bytes;
  };
  template <class Entry>
  Entry* at(int owner, std::size_t offset) {
    return static_cast<Entry*>(
        static_cast<void*>(segments_ + static_cast<std::size_t>(owner) * layout_.segment_bytes + offset));
  }
  // 1: the owner touches memory of the other rank's process.
  std::atomic<std::uint8_t>& uses(int owner, int other) {
    return at<std::atomic<std::uint8_t>>(owner, layout_.uses)[other];
  }
  // Events of the other rank's ring that end the owner's sleep.
  std::atomic<std::uint8_t>& awaits(int owner, int other) {
    return at<std::atomic<std::uint8_t>>(owner, layout_.awaits)[other];
  }
  // Sent by the owner to the other rank by ShmFdExchange.
  std::atomic<std::uint32_t>& control_messages(int owner, int other) {
    return at<std::atomic<std::uint32_t>>(owner, layout_.control_messages)[other];
  }
  std::atomic<std::uint64_t>& asleep(int position) { return header_->asleep[position / 64]; }
  static std::uint64_t asleep_bit(int position) { return std::uint64_t{1} << (position % 64); }
  void wake(int position);

  int self_;
  std::vector<int> ranks_;
  Layout layout_;
  Mapping mapping_;
  // The memory, opened by this rank. It holds a lock of the byte at this rank's position, which the kernel releases when
  // the process ends. A child made by fork has no part of it.
  ProcessFd lock_;
  Header* header_ = nullptr;
  std::byte* segments_ = nullptr;
  ShmFdExchange fd_exchange_;
  std::shared_ptr<PeerMemory> peer_memory_;
  std::vector<std::byte> bounce_;
  bool sleep_prepared_ = false;
  std::vector<int> awaited_;  // positions in `awaits` since prepare_sleep
  unsigned sleeps_without_ring_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t finished_by_all_ = 0;
  std::uint64_t last_stream_call_ = 0;
};

}  // namespace netfold::transport
