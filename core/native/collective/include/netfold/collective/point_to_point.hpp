// Messages between two ranks: send and receive, matched by source and tag (message_matcher.hpp). They have pipes of
// their own: through memory where the two ranks share it, else a connection.
//
// A message of n bytes travels in frames; each begins with a FrameHeader (H bytes):
//
//   eager       n <= kEagerBytes, within the receiver's credit: header and values at once. 1 trip, H + n bytes.
//   rendezvous  announce, accept, then the values in chunks straight into the receiver's buffer. 3 trips,
//               2 H + n + H * ceil(n / kChunkBytes) bytes.
//
// Where the pipe has RMA (transport/pipe.hpp), chunks go from memory to memory. A chunk's name is the message's id and
// the chunk's number. The receiver posts the buffers of the next chunks from the accept on.
//
// Memory of a GPU is never read or written here. A message from there is announced whatever its length, and the accept
// says so where the receive is into such memory; all its chunks then go by RMA, down to one byte. A sender must announce
// every message where the other rank may receive into such memory (announce_always). A message of 0 bytes is eager.
//
// Memory is bounded. A receiver keeps unmatched messages: of each sender at most kCreditBytes of eager messages and
// kMaxAnnounced announced ones. The sender counts its credit and gets it back as messages are received. A sender
// without credit and without a place for an announcement keeps its later messages in the caller's own memory.
//
// A receive from any source reads from the ranks that sent something, and looks at no other rank
// (transport/readable_peers.hpp).
//
// A peer that leaves or breaks its connection fails only the calls that wait for it. Messages that it sent before can
// still be received. Where sizes or dtypes differ (a receive may accept less than its size) the receiver fails, and an abort frame tells the sender the reason,
// as for every failure.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/collective/message_matcher.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/readable_peers.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace netfold::collective {

class PointToPoint {
 public:
  static constexpr std::size_t kEagerBytes = 128 << 10;
  static constexpr std::size_t kCreditBytes = 1 << 20;
  // The credit that a kept message costs beside its values.
  static constexpr std::size_t kMessageBytes = 256;
  static constexpr std::size_t kMaxAnnounced = 1 << 14;
  // Small enough that other messages are sent between two chunks.
  static constexpr std::size_t kChunkBytes = 1 << 20;
  // After so long a wait for a rank in memory the connection to it is made, which shows whether its process lives.
  static constexpr std::int64_t kConnectNs = transport::ReadablePeers::kConnectNs;

  using Ticket = MessageMatcher::Ticket;
  struct Done {
    Ticket ticket = 0;
    int peer = -1;             // the other end; of a receive from any source, the sender
    std::size_t received = 0;  // bytes of a received message
    std::uint64_t wire_bytes = 0;
    Algorithm::Registrations registrations;
  };
  struct Fault {
    Ticket ticket = 0;  // a call that fails by it
    Failure failure;
  };

  explicit PointToPoint(std::unique_ptr<transport::Mesh> lane);

  // Sends frames to and from the node's ranks through memory. The connections to them then only show whether they are
  // there. Call it before the first post. `node` must outlive the last call.
  void share(transport::ShmNode& node);

  // Sends no bytes before they are accepted: the other ranks may receive them into memory of a GPU. Call it before the
  // first post.
  void announce_always() { announces_always_ = true; }

  // Starts a send or receive. Borrows its buffer until the call is done, or the whole lane failed.
  void post(Ticket ticket, const Call& call);
  // Takes back a receive of a named rank whose message has not begun to arrive. False: it has, or the call is done.
  bool withdraw(Ticket ticket, const Call& call);
  // Does what can be done without blocking: moved or idle; failed once there is a fault.
  Progress poll();
  // Calls that are done since the last take.
  std::vector<Done> take_done() { return std::exchange(done_, {}); }
  const std::optional<Fault>& fault() const { return fault_; }
  void wait_for(WaitSet& set) const;
  // The connection to `peer` was made or is lost; called as `poll` is.
  void connection_changed(int peer);
  // The connection to `peer` was closed since it was idle; called as `poll` is.
  void connection_closed(int peer);
  // Ranks that a receive from any rank waits for without a connection (ReadablePeers::to_ask).
  std::vector<int> to_ask(std::int64_t now_ns);
  // Whether an awaited rank shares memory: a running rank then answers within microseconds.
  bool waits_for_memory() const;
  // The event that an unfinished call waits for: "rank 2 to send with tag 7; ...".
  std::string awaited(const Call& call) const;

  // Sends every peer the reason why this rank leaves. Best effort: one try, never blocks.
  void abort(const Failure& failure);
  // Forgets all calls, and with them the registrations of their memory. The mesh was cancelled before; the lane has failed
  // from then on.
  void release_memory();
  // Reads what the rank has sent, also where no call waits for it. Whether it is lost or has left.
  bool has_left(int rank);
  // Whether closing now would lose bytes that are still being sent.
  bool unconfirmed() const;
  void close() { lane_->close(); }
  transport::Mesh& mesh() { return *lane_; }

 private:
  using Receive = MessageMatcher::Receive;
  using Message = MessageMatcher::Message;
  using Lease = transport::Pipe::RegistrationLease;

  struct Send {
    Ticket ticket = 0;
    FrameHeader header;  // the message's
    const std::byte* data = nullptr;
    std::size_t sent = 0;  // bytes of the values, in chunks
    Lease lease;
    transport::Pipe::GpuLease gpu;  // that `data` is in; null: the host's memory
    std::size_t chunk_bytes = 0;    // once it is accepted
    bool must_use_rma = false;
  };
  struct Frame {
    FrameHeader header;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    Ticket ticket = 0;  // of the send that ends with this frame
    std::uint64_t wire_bytes = 0;
    std::uint64_t name = 0;  // of a chunk that goes by RMA
    bool uses_rma = false;
    Lease lease;
    transport::Pipe::GpuLease gpu;
  };
  // A sent frame whose memory the pipe may still use.
  struct InFlight {
    std::uint64_t end = 0;  // in the bytes sent to the peer
    Ticket ticket = 0;
    std::uint64_t wire_bytes = 0;
    Lease lease;
    transport::Pipe::GpuLease gpu;
  };
  // The frame that is being read.
  struct Input {
    FrameHeader header;
    std::byte* into = nullptr;
    std::size_t left = 0;
    std::optional<Receive> receive;  // `into` is its buffer; else a kept message's, or the reason's
    Message* message = nullptr;
    bool is_in_gpu = false;  // `into` is memory of a GPU
    std::string reason;
  };
  struct Peer {
    // To the peer.
    std::deque<Frame> frames;  // at most one for each unfinished call, and one with credit
    std::optional<Frame> writing;
    std::size_t written = 0;       // bytes of `writing`
    std::uint64_t sent_bytes = 0;  // in all
    std::deque<InFlight> in_flight;
    std::deque<Send> held;  // without credit or a place for an announcement
    std::unordered_map<std::uint64_t, Send> announced;
    std::deque<Send> streaming;
    std::size_t credit = kCreditBytes;
    // From the peer.
    std::vector<std::byte> staging;
    std::size_t begin = 0;  // of the bytes in staging
    std::size_t end = 0;
    Input input;
    std::unordered_map<std::uint64_t, Receive> accepted;
    std::size_t kept_bytes = 0;
    std::size_t kept_announced = 0;
    std::size_t credit_owed = 0;

    std::size_t outstanding = 0;              // this rank's calls that need the peer
    mutable std::int64_t waits_since_ns = 0;  // asleep for want of the peer's bytes, or of its reads; 0: not
    bool is_busy = false;                     // listed in busy_
    bool is_readable = false;                 // listed in readable_
    Failure failure;                          // why the peer is gone

    bool has_work() const {
      return outstanding > 0 || writing || !frames.empty() || !streaming.empty() || !in_flight.empty();
    }
  };

  // Makes the peer's state where there is none, and lists it in busy_.
  Peer& at(int peer);
  // Precondition: there is a state, as for each peer in busy_.
  const Peer& at(int peer) const { return *peers_[static_cast<std::size_t>(peer)]; }

  // point_to_point.cpp: calls and frames.
  void post_send(Ticket ticket, const Call& call);
  void post_receive(Ticket ticket, const Call& call);
  // False: neither credit nor a place for an announcement is left.
  bool launch(int peer, const Send& send);
  void launch_held(int peer);
  std::optional<Receive> match(int peer, int tag);
  void receive_kept(int peer, Message& message, Receive receive);
  void accept(int peer, const FrameHeader& header, Receive receive);
  bool is_eager(const FrameHeader& header) const {
    const bool waits = announces_always_ || header.gpu_chunk_bytes > 0;
    return header.bytes <= kEagerBytes && (header.bytes == 0 || !waits);
  }
  bool fits(int peer, const FrameHeader& header, const Receive& receive);
  bool may_copy(int peer, const FrameHeader& header, const Receive& receive);
  void handle(int peer, const FrameHeader& header);
  void finish_input(int peer);
  void return_credit(int peer, std::size_t bytes);
  void finish(int peer, Ticket ticket, std::size_t received, std::uint64_t wire_bytes, const Lease& lease = nullptr);
  void broken(int peer, const std::string& what);
  // The longest chunk with a rank from or into memory of a GPU; 0: there can be none.
  std::size_t gpu_chunk_bytes(int peer) const;
  void fail_for_gpu(int peer, Ticket ticket, const std::string& what);

  // point_to_point_io.cpp: the streams, and peers that are gone.
  static std::uint64_t name_of(std::uint64_t message, std::size_t begin, std::size_t chunk_bytes);
  bool next_frame(int peer);
  bool next_chunk(int peer);
  bool reclaim(int peer);
  void post_chunks(int peer);
  bool write(int peer);
  bool read(int peer);
  void consume(int peer);
  bool read_from_any();
  void lose(int peer, const transport::Mesh::Io& io);
  void lose(int peer, Failure failure);
  void fail_for_lost_peers();
  Ticket any_ticket(int peer) const;

  std::unique_ptr<transport::Mesh> lane_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null until the first message to or from the rank
  std::vector<int> busy_;                     // the ranks that a poll concerns, in no order
  std::vector<bool> in_memory_;               // by rank
  bool announces_always_ = false;
  transport::ShmNode* node_ = nullptr;
  std::unique_ptr<transport::ReadablePeers> readable_peers_;  // from the first receive from any source on
  std::vector<int> readable_;  // the ranks whose bytes such receives read next, in no order
  std::vector<int> senders_;   // kept between polls so that a poll allocates nothing
  int lost_ = -1;              // a rank that is gone, one with a failure if there is one; -1: none is
  int lost_count_ = 0;         // ranks that are gone
  MessageMatcher matcher_;
  std::vector<Done> done_;
  std::optional<Fault> fault_;
};

}  // namespace netfold::collective
