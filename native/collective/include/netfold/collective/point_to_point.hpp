// Messages between two ranks: send and receive, matched by source and tag, over pipes of their own: through memory
// where two ranks share it, else a connection.
//
// What travels for a message of n bytes, in frames that each begin with a FrameHeader (H bytes):
//   eager       n <= kEagerBytes, within the receiver's credit: header and values at once.   1 way,  H + n
//   rendezvous  announce, accept back, then the values in chunks, straight into the
//               receiver's buffer.                            3 ways, 2 H + n + H * ceil(n / kChunkBytes)
// Chunks go from memory to memory where the pipe has a direct path: a chunk's name is the message's id and its number,
// and the receiver names their places from the accept on, a few ahead.
// Matching is MPI's: a receive names a tag, and a source or any; among messages with the same source and tag the
// first that was sent meets the first receive that was asked for. It goes by headers, in the order of the
// stream, so an announced message keeps its place among eager ones.
//
// Nothing grows without a bound. A receiver keeps what nobody waits for yet: at most kCreditBytes of eager
// messages a sender, who counts them and gets the credit back as they are taken, and kMaxAnnounced announced
// ones. A sender that has used up both keeps its later messages to itself, in the caller's own memory.
//
// A peer that leaves or breaks is a failure only for who waits for it; what it had sent before can still be
// received. That sizes or dtypes differ is a failure of the receiver, and the sender hears of it as of every
// failure: by an abort frame that says why.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace netfold::collective {

struct FrameHeader {
  enum class Type : std::uint8_t { eager = 1, announce = 2, accept = 3, chunk = 4, credit = 5, abort = 6 };
  static constexpr std::uint32_t kMagic = 0x4e465031;
  std::uint32_t magic = kMagic;
  Type type = Type::eager;
  std::uint8_t dtype = 0;
  std::uint8_t failure = 0;  // of an abort: Failure::Kind
  std::uint8_t orderly = 0;  // of an abort
  std::int32_t tag = 0;      // of an abort: the rank at fault, -1 where nobody knows
  std::int32_t reserved = 0;
  std::uint64_t id = 0;     // of the message, its sender's
  std::uint64_t bytes = 0;  // of the message; of a chunk, credit or abort: of itself
};
static_assert(sizeof(FrameHeader) == 32);

class PointToPoint {
 public:
  static constexpr std::size_t kEagerBytes = 128 << 10;
  static constexpr std::size_t kCreditBytes = 1 << 20;
  // What a kept message costs the receiver beside its values.
  static constexpr std::size_t kMessageBytes = 256;
  static constexpr std::size_t kMaxAnnounced = 1 << 14;
  // Small enough that others get their turn on the stream between two chunks.
  static constexpr std::size_t kChunkBytes = 1 << 20;

  using Ticket = std::uint64_t;  // the caller's name for a call
  struct Done {
    Ticket ticket = 0;
    int peer = -1;  // the other end; of a receive from any source, who it was
    std::uint64_t wire_bytes = 0;
    Algorithm::Registrations registrations;
  };
  struct Fault {
    Ticket ticket = 0;  // who waited for it
    Failure failure;
  };

  explicit PointToPoint(std::unique_ptr<transport::Mesh> lane);

  // Before the first call. Frames to and from the node's ranks then go through memory, and the connections to them only
  // say who is there. `node` must outlive the last call.
  void share(transport::ShmNode& node);

  // Takes up a send or receive. Borrows its buffer until it is done, or the whole lane failed. Tickets are not 0.
  void post(Ticket ticket, const Call& call);
  // Does what can be done without blocking: moved or idle; failed once there is a fault.
  Progress poll();
  // Calls that ended since the last time.
  std::vector<Done> take_done() { return std::exchange(done_, {}); }
  const std::optional<Fault>& fault() const { return fault_; }
  void wait_for(WaitSet& set) const;
  // Whether one of the ranks that calls wait for shares memory: its words come in microseconds, if it runs.
  bool waits_for_memory() const;
  // For whom and what a call that is not done waits: "rank 2 to send with tag 7; ...".
  std::string awaited(const Call& call) const;

  // Tells every peer why this rank leaves; best effort, one try, never blocks.
  void abort(const Failure& failure);
  // Whether something said is still on its way, and would be lost by closing now.
  bool unconfirmed() const;
  void close() { lane_->close(); }
  transport::Mesh& mesh() { return *lane_; }

 private:
  struct Send {
    Ticket ticket = 0;
    FrameHeader header;  // the message's
    const std::byte* data = nullptr;
    std::size_t sent = 0;  // of the values, in chunks
    std::shared_ptr<transport::Pipe::RegistrationLease> lease;
  };
  struct Receive {
    Ticket ticket = 0;
    int source = kAnySource;
    int tag = 0;
    std::uint8_t dtype = 0;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t got = 0;
    std::size_t placed = 0;  // of the values, whose places the sender knows, or that need none
    std::uint64_t order = 0;
    std::shared_ptr<transport::Pipe::RegistrationLease> lease;
  };
  // Arrived, and nobody waits for it yet. Without values when it is only announced.
  struct Message {
    FrameHeader header;
    std::vector<std::byte> values;
    std::uint64_t order = 0;
  };
  struct Frame {
    FrameHeader header;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    Ticket ticket = 0;  // of the send that ends with this frame
    std::uint64_t wire_bytes = 0;
    std::uint64_t name = 0;  // of a chunk that goes the direct path
    bool uses_rma = false;
    std::shared_ptr<transport::Pipe::RegistrationLease> lease;
  };
  // A frame of ours that was taken, and whose memory may not be back.
  struct InFlight {
    std::uint64_t end = 0;  // of the bytes taken
    Ticket ticket = 0;
    std::uint64_t wire_bytes = 0;
    std::shared_ptr<transport::Pipe::RegistrationLease> lease;
  };
  // The frame that is being read.
  struct Input {
    FrameHeader header;
    std::byte* into = nullptr;
    std::size_t left = 0;
    std::optional<Receive> receive;  // whose buffer `into` is; else a kept message's, or the reason's
    Message* message = nullptr;
    std::string reason;
  };
  struct Peer {
    std::deque<Frame> frames;  // one for each call under way, at most, and one with credit
    std::optional<Frame> writing;
    std::size_t written = 0;
    std::uint64_t taken = 0;  // bytes, in all
    std::deque<InFlight> in_flight;
    std::deque<Send> held;
    std::unordered_map<std::uint64_t, Send> announced;
    std::deque<Send> streaming;
    std::size_t credit = kCreditBytes;

    std::vector<std::byte> staging;
    std::size_t begin = 0;
    std::size_t end = 0;
    Input input;
    std::unordered_map<std::uint64_t, Receive> accepted;
    std::size_t kept_bytes = 0;
    std::size_t kept_announced = 0;
    std::size_t owed = 0;         // credit to give back
    std::size_t outstanding = 0;  // calls of ours that need this peer
    bool in_memory = false;
    Failure gone;
  };
  using Key = std::pair<int, int>;  // tag, source

  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  void post_send(Ticket ticket, const Call& call);
  void post_receive(Ticket ticket, const Call& call);
  bool launch(int peer, const Send& send);
  void launch_held(int peer);
  bool next_frame(int peer);
  bool next_chunk(int peer);
  bool take_back(int peer);
  void name_places(int peer);
  bool write(int peer);
  bool read(int peer);
  void consume(int peer);
  void handle(int peer, const FrameHeader& header);
  void finish_input(int peer);
  std::optional<Receive> match(int peer, int tag);
  void take(int peer, Message& message, Receive receive);
  void accept(int peer, const FrameHeader& header, Receive receive);
  bool fits(int peer, const FrameHeader& header, const Receive& receive);
  void give_back(int peer, std::size_t bytes);
  void finish(int peer, Ticket ticket, std::uint64_t wire_bytes,
              const transport::Pipe::RegistrationLease* lease = nullptr);
  void lose(int peer, const transport::Mesh::Io& io);
  void look_for_the_missing();
  Ticket any_ticket(int peer) const;
  void broken(int peer, const std::string& what);

  std::unique_ptr<transport::Mesh> lane_;
  std::vector<Peer> peers_;
  std::map<Key, std::deque<Receive>> posted_;
  std::map<Key, std::deque<Message>> kept_;
  std::size_t posted_to_any_ = 0;
  std::uint64_t order_ = 0;
  std::vector<Done> done_;
  std::optional<Fault> fault_;
};

}  // namespace netfold::collective
