// Messages between ranks over a mesh: a header that says which call the bytes belong to, then the bytes.
//
// Every connection carries the group's calls in order. A header that differs from the expected one therefore means that
// two ranks called different things; both report that before a wrong value arrives. A rank that gives up sends its
// reason in an abort message, so that the other ranks do not take it for dead.
//
// Where a pipe has RMA (transport/pipe.hpp), the bytes of an `only` message (the only one to a peer in a call) go by
// it: in chunks of kRmaChunkBytes, the last one shorter, each to a buffer that the receiver posted.
//
// PipelinedPlan (pipelined_plan.hpp) is an engine of its own: its streams have a marker before every chunk on the wire,
// and its chunks wait for each other. A message has neither, and no state for each chunk.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/collective/slice.hpp>
#include <netfold/transport/mesh.hpp>

#include <span>
#include <utility>

namespace netfold::collective {

struct MessageHeader {
  static constexpr std::uint32_t kMagic = 0x4e464d31;
  std::uint32_t magic = kMagic;
  std::uint32_t sequence = 0;  // of an abort: Expired::call
  Kind kind = {};
  Element element = {};
  kernels::ReduceOp reduce = {};
  kernels::DType wire = {};
  AlgorithmId algorithm = {};
  std::uint8_t is_abort = 0;
  std::uint16_t table = 0;
  std::int32_t root = 0;  // packed_root; of an abort: the rank at fault, -1 if unknown
  Averaging average = Averaging::none;
  AlgorithmId between = {};
  std::uint8_t step_of = 0;  // Call::step_of
  std::uint8_t reserved = 0;
  std::uint64_t elements = 0;  // or Call::layout; of an abort: Expired::timeout_ns
  std::uint64_t bytes = 0;     // behind this header; of an abort: packed_abort

  static MessageHeader of(const Call& call, std::uint64_t bytes);
  // A call inside another call also has the outer call's root: above 16 bits, plus 1.
  static std::int32_t packed_root(const Call& call) { return call.root | (call.whole_root + 1) << 16; }
  // The bytes of an abort's reason, and the first call that its sender has not finished.
  static std::uint64_t packed_abort(std::size_t reason_bytes, std::uint32_t unfinished) {
    return std::uint64_t{unfinished} << 32 | reason_bytes;
  }
  std::size_t reason_bytes() const { return bytes & 0xffffffff; }
  std::uint32_t unfinished() const { return static_cast<std::uint32_t>(bytes >> 32); }
  // "all_reduce #12 of 10 f32 (sum, root 0, ring, wire f32, 40 bytes)"
  std::string text() const;
  // text() without the bytes: the same on all ranks of a call.
  std::string summary() const;
};
static_assert(sizeof(MessageHeader) == 40);

// Stands before every chunk of a stream. A stream takes long, so it can end between two chunks with an abort. Eight
// bytes keep the values aligned.
enum class ChunkMarker : std::uint64_t { chunk = 0x4e46706965636531, abort = 0x4e4661626f727431 };

constexpr std::size_t kRmaChunkBytes = 512 << 10;
// How many messages one rank sends to another in a call.
enum class Among : std::uint8_t { several, only };

// One whole message to a peer, from borrowed memory.
class Outgoing {
 public:
  Outgoing(const Call& call, int peer, const std::byte* data, std::size_t bytes, Among among = Among::several)
      : peer_(peer), data_(data), bytes_(bytes), among_(among), header_(MessageHeader::of(call, bytes)) {}
  // All bytes are sent and the pipe has returned their memory.
  bool done() const { return all_sent() && is_returned_; }
  int peer() const { return peer_; }
  // Events to wait for while it is not done.
  short events() const { return all_sent() ? 0 : POLLOUT; }
  // How many of the first bytes of `memory` this message does not need any more, or never did.
  std::size_t free_before(const transport::Mesh& mesh, const Buffer& memory) const;
  // Moves about `most` bytes, or less. Returns bytes moved.
  std::size_t advance(transport::Mesh& mesh, Failure& failure, std::size_t most = kSliceBytes);

 private:
  int peer_ = -1;
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Among among_ = Among::several;
  std::size_t sent_ = 0;
  bool is_returned_ = true;
  MessageHeader header_;

  bool all_sent() const { return sent_ == sizeof(MessageHeader) + bytes_; }
  bool uses_rma(const transport::Mesh& mesh, std::size_t chunk) const {
    return among_ == Among::only && mesh.uses_rma(peer_, chunk);
  }
  transport::Mesh::Io send(transport::Mesh& mesh, std::size_t most);
};

// The header of a message from a peer.
class IncomingHeader {
 public:
  // `early`: bytes of the message that have been read already.
  IncomingHeader(const Call& call, int peer, std::size_t bytes, std::span<const std::byte> early = {})
      : peer_(peer), early_(early.begin(), early.end()), expected_(MessageHeader::of(call, bytes)) {}
  int peer() const { return peer_; }
  bool done() const { return received_ == sizeof(MessageHeader) && !expects_reason_; }
  const MessageHeader& expected() const { return expected_; }
  // Reads and compares. A difference, an abort or a closed connection fills `failure`. Returns bytes moved.
  std::size_t advance(transport::Mesh& mesh, Failure& failure);

 private:
  transport::Mesh::Io receive(transport::Mesh& mesh, std::byte* into, std::size_t bytes);

  int peer_ = -1;
  std::size_t received_ = 0;
  bool expects_reason_ = false;
  std::vector<std::byte> early_;
  MessageHeader expected_;
  MessageHeader header_;
  std::string reason_;
};

// One whole message from a peer, into borrowed memory.
class Incoming {
 public:
  Incoming(const Call& call, int peer, std::byte* data, std::size_t bytes, Among among = Among::several)
      : header_(call, peer, bytes), data_(data), bytes_(bytes), among_(among) {}
  bool done() const { return header_.done() && received_ == bytes_; }
  int peer() const { return header_.peer(); }
  std::size_t received() const { return received_; }
  // Moves about `most` bytes, or less. Returns bytes moved.
  std::size_t advance(transport::Mesh& mesh, Failure& failure, std::size_t most = kSliceBytes);

 private:
  // Bytes that may be posted beyond those received.
  static constexpr std::size_t kAhead = 4 * kRmaChunkBytes;
  static constexpr std::size_t kSmallBytes = 256;

  void post_receives(transport::Mesh& mesh);

  IncomingHeader header_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Among among_ = Among::several;
  std::size_t received_ = 0;
  std::size_t posted_ = 0;  // bytes that are posted, or need no posting
};

// Registrations of a call's tensors with a fabric, each as a whole and not chunk by chunk, for as long as the fabric
// may read or write them. They end with the operation, which by then is complete or has cancelled its transfers.
class TensorRegistrations {
 public:
  void acquire(const Call& call, transport::Mesh& mesh);
  // Hits and misses of the registration cache so far.
  Algorithm::Registrations registrations() const;

 private:
  std::vector<transport::Pipe::RegistrationLease> leases_;
};

// The failure of two ranks whose calls differ; the text names both calls.
Failure mismatch(int peer, const MessageHeader& theirs, int self, const MessageHeader& ours);
// The failure that a rank reported when it left the group. `fault`: the rank that it holds to be at fault, or -1.
Failure remote_abort(int peer, int fault, const std::string& reason, Expired expired, int self,
                     const MessageHeader& during);
Failure peer_lost(int peer, const transport::Mesh::Io& io, const MessageHeader& during);
// The abort that a peer sent before it closed its connection; `lost` if it sent none. Precondition: no message from the
// peer is half read.
Failure read_last_abort(transport::Mesh& mesh, int peer, const Call& call, Failure lost);
// The failure where a peer has given this call up, or made another call, although it had sent all that this rank needs of
// it. Reads what lies behind the last message of the call; one try, never blocks. A call asks before it succeeds.
// Precondition: no message from the peer is half read.
Failure find_gave_up(transport::Mesh& mesh, int peer, const Call& call);
// When a call that waits looks whether a peer gave it up: a rank must not pass on values of a call that failed elsewhere.
// A call that takes less than kLookNs never looks, and waits for nothing more than without this.
class GaveUpTimer {
 public:
  bool is_due(std::int64_t now_ns) {
    if (now_ns < next_ns_) return false;
    has_looked_ = next_ns_ > 0;
    next_ns_ = now_ns + kLookNs;
    return has_looked_;
  }
  // Whether the call waits for an abort of the ranks that send nothing more in it.
  bool has_looked() const { return has_looked_; }
  // To arm a timer of 1 ms costs a small call microseconds, a later one does not.
  std::int64_t wake_ns() const { return has_looked_ ? -1 : next_ns_ + 100 * kLookNs; }

 private:
  static constexpr std::int64_t kLookNs = 1'000'000;
  std::int64_t next_ns_ = 0;
  bool has_looked_ = false;
};

// Sends every peer the reason why this rank leaves and the rank at fault. Best effort: one try, never blocks.
// unfinished: the first call that this rank has not finished.
void send_abort(transport::Mesh& mesh, const Failure& failure, std::uint32_t unfinished);

}  // namespace netfold::collective
