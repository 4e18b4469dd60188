// The worker's half of aggregation: which chunk to send now, and what an answer means.
//
// Theory of operation. A group's operations are laid end to end on one endless line of chunks. The worker
// keeps at most W of them in flight: chunk c goes out only when every chunk up to c - W is answered (the
// switch's proof rests on this). Operations follow each other through the window with no barrier between.
//
//   chunk state   event                                        becomes      action
//   (unsent)      window has room, poll_send                   in flight    send
//   in flight     its answer                                   answered     deliver values
//   in flight     answers to kReorderThreshold later sends,    lost         -
//                 and, if it was sent again, overdue
//   in flight     oldest, and no answer for one timeout        lost         - (timeout doubles)
//   in flight     overdue, and a probe is answered             lost         - (kProbeGrowth at a time)
//   lost          poll_send                                    in flight    send again
//   lost          its answer                                   answered     deliver values
//   answered      every chunk before it answered too           (forgotten)  window moves
//
// Losses are found by gaps in the answers, in order of sending, as TCP does with selective acknowledgements; the timer
// only catches the tail. One worker's loss is a gap to all of them, and the others cannot tell: they send once more in
// vain, but not twice, since a chunk that was sent again must be overdue as well (its answer waits for the slowest
// repair). A straggler, too, looks like a loss to everybody else: so a timeout sends one chunk again, as a probe, and
// backs off. When a probe is answered, what is overdue follows, twice as much each round trip: a whole lost window is
// repaired in log2(W) of them. A duplicate changes nothing at the switch, but costs the wire.
//
// The machine holds no values: the caller encodes what `Send` names and decodes what `Received` names. Like
// its counterpart it is a value (copyable, comparable, canonical bytes) with no socket, clock or thread, and
// allocates only when it is made.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <array>
#include <optional>
#include <vector>

namespace netfold::protocol {

struct WorkerConfig {
  std::uint32_t job = 0;
  std::uint32_t epoch = 0;
  std::uint32_t incarnation = 0;
  std::uint16_t worker = 0;
  std::uint16_t workers = 0;
  std::uint32_t window = 0;
  std::uint32_t payload_bytes = 0;

  bool operator==(const WorkerConfig&) const = default;
};

class Worker {
 public:
  // Operations that may be under way at once.
  static constexpr std::size_t kMaxOperations = 16;
  // Answers to later sends after which a chunk counts as lost. Small, since one path rarely reorders; more
  // than TCP's three, since a batch of one socket call may be processed out of order by several receive
  // queues.
  static constexpr std::uint64_t kReorderThreshold = 8;
  static constexpr std::int64_t kInitialTimeoutNs = 50'000'000;
  static constexpr std::int64_t kMinTimeoutNs = 10'000'000;
  static constexpr std::int64_t kMaxTimeoutNs = 200'000'000;
  // Overdue chunks that follow the answer to a probe, as probes themselves.
  static constexpr std::uint32_t kProbeGrowth = 2;

  // Throws std::invalid_argument.
  explicit Worker(const WorkerConfig& config);

  struct Operation {
    std::uint32_t operation = 0;
    std::uint64_t elements = 0;  // > 0
    kernels::DType wire = kernels::DType::f32;
    kernels::ReduceOp reduce = kernels::ReduceOp::sum;
    std::uint16_t table = 0;
    bool operator==(const Operation&) const = default;
  };
  bool can_start() const { return operation_count_ < kMaxOperations; }
  // Appends an operation to the line; it must be the same, in the same order, on every worker. Precondition:
  // can_start().
  void start(const Operation& operation);

  // What goes out now, if anything: the header is complete, the values are elements [first, first + count) of
  // `operation`. Call until empty. `again` marks a retransmission.
  struct Send {
    Header header;
    std::uint64_t first = 0;
    std::uint16_t count = 0;
    bool again = false;
  };
  std::optional<Send> poll_send(std::int64_t now_ns);
  // The socket did not take the packet after all; it will be offered again.
  void not_sent(std::uint64_t chunk);
  // How many chunks could be sent now without further answers (lost ones included).
  std::uint32_t sendable() const;

  enum class Outcome : std::uint8_t { dropped, received, mismatch };
  struct Received {
    Outcome outcome = Outcome::dropped;
    Drop drop = Drop::none;
    Header header;            // mismatch: what the other worker (header.worker) asked for
    std::uint64_t first = 0;  // received: element offset in header.operation, header.count values
    bool finished = false;    // received: it was the operation's last
    std::span<const std::byte> values;
  };
  Received handle_packet(std::span<const std::byte> bytes, std::int64_t now_ns);

  // When handle_timeout should be called, or -1 when nothing is in flight.
  std::int64_t poll_timeout() const;
  void handle_timeout(std::int64_t now_ns);

  std::uint32_t in_flight() const { return flight_.count; }
  std::uint64_t oldest_unanswered() const { return base_; }
  bool idle() const { return base_ == end_; }
  std::int64_t smoothed_rtt_ns() const { return smoothed_rtt_ns_; }
  std::uint64_t retransmissions() const { return retransmissions_; }
  std::uint64_t packets_sent() const { return counter_; }
  const WorkerConfig& config() const { return config_; }
  std::size_t packet_bytes() const { return kHeaderBytes + config_.payload_bytes; }

  bool operator==(const Worker&) const = default;
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  enum class State : std::uint8_t { unsent, flight, lost, answered };
  struct Entry {  // of chunk c at index c mod W
    State state = State::unsent;
    bool again = false;
    bool probe = false;  // sent again by the timer's doing, not a gap's
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
    std::uint64_t send_number = 0;
    std::int64_t sent_ns = 0;
    bool operator==(const Entry&) const = default;
  };
  struct List {  // intrusive, in order of sending; so bounded by W
    std::uint32_t head = kNone;
    std::uint32_t tail = kNone;
    std::uint32_t count = 0;
    bool operator==(const List&) const = default;
  };
  struct Line {  // where an operation lies on the line of chunks
    Operation operation;
    std::uint64_t first_chunk = 0;
    std::uint64_t chunk_count = 0;
    std::uint64_t answered = 0;
    std::uint64_t per_chunk = 0;  // elements
    bool operator==(const Line&) const = default;
  };

  void push_back(List& list, std::uint32_t index);
  void unlink(List& list, std::uint32_t index);
  void mark_lost(std::uint32_t index, bool probe);
  void measure(std::int64_t rtt_ns);
  Line* line_of(std::uint64_t chunk);
  std::int64_t base_timeout_ns() const;
  std::int64_t timeout_ns() const;
  std::uint64_t chunk_at(std::uint32_t index) const;
  std::uint16_t count_of(const Line& line, std::uint64_t chunk) const;

  WorkerConfig config_;
  std::vector<Entry> entries_;
  List flight_;
  List lost_;
  std::array<Line, kMaxOperations> lines_;  // the first operation_count_, in order
  std::size_t operation_count_ = 0;
  std::uint64_t base_ = 0;  // lowest chunk without an answer
  std::uint64_t next_ = 0;  // lowest chunk never sent
  std::uint64_t end_ = 0;   // first chunk after the last operation
  std::uint64_t counter_ = 0;
  std::uint64_t highest_answered_send_ = 0;
  std::uint64_t retransmissions_ = 0;
  std::int64_t smoothed_rtt_ns_ = 0;
  std::int64_t rtt_variation_ns_ = 0;
  std::uint32_t backoff_ = 0;
  std::int64_t timer_start_ns_ = 0;
};

}  // namespace netfold::protocol
