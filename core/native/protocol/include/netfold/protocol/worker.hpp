// The worker's half of aggregation: which chunk to send now, and what an answer means.
//
// Theory of operation. A group's operations follow each other in one endless sequence of chunks. The worker keeps at
// most W chunks in flight: chunk c goes out only when every chunk up to c - W is answered; the switch's proof rests on
// this rule. Operations stream through the window without a barrier between them.
//
//   chunk state   event                                         becomes      action
//   (unsent)      both windows have room, poll_send             in flight    send
//   in flight     its answer                                    received     deliver values
//   in flight     a NACK of its last send                       lost         -
//   in flight     passed over, and its answer was skipped       lost         -
//   in flight     passed over, and overdue by a repair's time   lost         -
//   in flight     oldest, and no answer for one timeout         lost         - (timeout doubles)
//   in flight     overdue, and only answers to probes came      lost         - (kProbeGrowth for each answered probe)
//                 for kProbeWaitNs
//   lost          poll_send                                     in flight    send again
//   lost          its answer                                    received     deliver values
//   received      every chunk before it is received too         (forgotten)  window moves
//
// Finding losses. Both ends find losses by later packets, and the timer only catches the tail. A lost contribution is a
// gap in this worker's packet numbers at the switch, which sends a NACK to this worker alone (gap_detector.hpp). A lost
// answer is found here. The switch numbers its answers in the order in which chunks become complete. So a number that
// is skipped between the answers to sends s and t was most likely for a chunk sent between them, else for a chunk that
// had been passed over before. The worker asks for that answer once answers to kReorderThreshold later sends passed the
// chunk over, and again where they pass over the new send too, since the switch answers it at once. A chunk that is
// passed over while no number is missing waits for another worker's repair. Only where that takes longer than repairs
// do is the chunk sent once more, since a NACK may be lost too. A retransmission has a new packet number and a new
// place in the order of sending, so a second loss of the contribution is found like the first.
//
// Probes. To the other workers a straggler looks like a loss. So a timeout sends one chunk again, as a probe, and backs
// off. When the probe is answered, and nothing else is, the overdue chunks follow, twice as many in each round trip: a
// whole lost window is repaired in log2(W) round trips. Where the timeout was wrong, since the switch or the path
// paused, the other answers follow right behind the probe's, and the worker waits for them. A duplicate changes nothing
// at the switch, but it costs bandwidth.
//
// Within W, a congestion window bounds the chunks in flight. One of three controls sets it once a round trip:
//
//   control      sets the window                                      until
//   slow_start   from kLeastWindow, twice as large each round trip    a queue, or many losses (as TCP's)
//   delay        larger by kWindowGrowth; with a queue, smaller by    with half the window the queue stays as long: it
//                the queue's excess over kQueueTargetNs               is another flow's
//   share        larger or smaller after each trial, towards three    the queue is all ours, or short, or the path
//                eighths of the link's rate                           itself became longer
//
// Many losses are more than one packet in kLossTolerance, and more than kFewLosses. They reduce the window by three
// tenths, and under Control::share, where trials find our share, by a tenth. Fewer losses do not indicate a queue, and
// sending less would only add to their cost. A queue is the difference between the quickest answer of a round trip and
// the least round trip ever measured. It may stand at the switch's end of the path, at this end, or be contributions
// that wait in slots for a worker that is a little behind. Chunks that were in flight at a timeout do not count: a
// straggler or a loss delayed them. All jobs that share a port see its queue, and share it. W exceeds the chunks in
// flight by enough to go on sending while the oldest chunk is repaired.
//
// A flow that fills the queue until it overflows, as TCP does, would take the whole link from a flow that keeps the
// queue short. So Control::share measures which part of the link is ours, whatever the least round trip is: a trial
// halves the window for kTrialRounds. Alone, the round trip halves too; beside other flows it falls by half our share
// of it (as Nimbus, Goyal et al. 2018, tells elastic flows from others; Copa, Arun and Balakrishnan, NSDI 2018, section
// 2.2, has two modes as well, but chooses by whether the queue ever empties). Below three eighths the window grows,
// above them it shrinks: a flow that takes the bandwidth that a trial frees makes our share look smaller than it is.
// Where the delay changes by at most an eighth with the window in kUnmovedTrials trials, it is the path's own.
//
// Pacing. A window larger than kLeastWindow is not sent at once: new chunks leave at kPacePercent of the window a round
// trip at most, in bursts of kBurstNs or a quarter of a round trip. So a whole window that is free after a pause is
// spread over most of a round trip, and a path that answers within kBurstNs needs no timer.
//
// The machine holds no values: the caller encodes the elements that `Send` names and decodes those that `Received`
// names. Like the switch's machine it is a value (copyable, comparable, canonical bytes) without socket, clock or
// thread, and allocates only when it is made.
#pragma once

#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/index_list.hpp>
#include <netfold/protocol/packet.hpp>

#include <array>
#include <bit>
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
  // Operations in progress at once.
  static constexpr std::size_t kMaxOperations = 16;
  static constexpr std::int64_t kInitialTimeoutNs = 50'000'000;
  static constexpr std::int64_t kMinTimeoutNs = 10'000'000;
  static constexpr std::int64_t kMaxTimeoutNs = 200'000'000;
  // Overdue chunks that are sent as probes for each answered probe, and the wait for other answers before that.
  static constexpr std::uint32_t kProbeGrowth = 2;
  static constexpr std::int64_t kProbeWaitNs = 2'000'000;
  // The delay that a path's queue may add to a round trip. The queue feeds the link while a host's cores are busy.
  // Linux gives one TCP flow 1 to 2.6 ms of its own host's queue (TCP small queues: a millisecond at its rate, but two
  // segments of up to 64 KB). A longer target would take the link from such a flow, a shorter one leave the link to it.
  static constexpr std::int64_t kQueueTargetNs = 3'500'000;
  // The same while a host algorithm of the same operation uses the path. That queue is the operation's own, and giving
  // way to it would delay the switch's part.
  static constexpr std::int64_t kOwnQueueTargetNs = 28'000'000;
  // Round trips of a trial, and between two trials under Control::share: the window is halved in one of five.
  static constexpr std::uint32_t kTrialRounds = 2;
  static constexpr std::uint32_t kRoundsBetweenTrials = 8;
  // Successive trials, each with a larger window, that find an eighth of the link or less to be ours.
  static constexpr std::uint32_t kUnmovedTrials = 4;
  // Up to one lost packet in kLossTolerance, and up to kFewLosses in a round trip, do not count as congestion.
  static constexpr std::uint64_t kLossTolerance = 16;
  static constexpr std::uint64_t kFewLosses = 2;
  // Of the congestion window, in chunks: growth per round trip; first and least size; least size in a trial. With fewer
  // chunks in flight than kReorderThreshold and some losses, only the timer would find a loss.
  static constexpr std::uint32_t kWindowGrowth = 8;
  static constexpr std::uint32_t kLeastWindow = 4 * kReorderThreshold;
  static constexpr std::uint32_t kLeastTrialWindow = kLeastWindow / 2;
  // The pace in percent of the window per round trip, which leaves room to grow as TCP's pacing does; and the burst
  // after a pause. A sender with a shorter burst would need a timer for every few packets.
  static constexpr std::int64_t kPacePercent = 125;
  static constexpr std::int64_t kSlowStartPacePercent = 200;
  static constexpr std::int64_t kBurstNs = 2'000'000;

  // Throws std::invalid_argument.
  explicit Worker(const WorkerConfig& config);

  struct Operation {
    std::uint32_t operation = 0;
    std::uint64_t elements = 0;  // > 0
    kernels::DType wire = kernels::DType::f32;
    kernels::ReduceOp reduce = kernels::ReduceOp::sum;
    std::uint16_t table = 0;
    std::uint32_t size_digest = 0;  // not 0: the header's `elements`, in place of their number
    bool operator==(const Operation&) const = default;
  };
  bool can_start() const { return operation_count_ < kMaxOperations; }
  // Appends an operation to the chunk sequence; every worker appends the same operations in the same order.
  // Precondition: can_start().
  void start(const Operation& operation);

  // Returns this worker's call at a chunk, from the lowest unanswered chunk to the last of an operation.
  CallDescriptor descriptor_at(std::uint64_t chunk) const;

  // A packet to send: its complete header, and the operation's elements that are its values.
  struct Send {
    Header header;
    std::uint64_t first = 0;  // element
    std::uint16_t count = 0;
    bool again = false;  // a retransmission
  };
  // Returns the next packet to send. Call until empty.
  std::optional<Send> poll_send(std::int64_t now_ns);
  // The socket refused the chunk's packet: poll_send will offer it again.
  void not_sent(std::uint64_t chunk);
  // Sets whether a host algorithm of the same operation uses the path now (kOwnQueueTargetNs).
  void share_path(bool with_own) { queue_target_ns_ = with_own ? kOwnQueueTargetNs : kQueueTargetNs; }
  // Returns the chunks, lost ones included, that could be sent without further answers or timeouts; pacing may delay
  // them.
  std::uint32_t sendable() const;

  // nack: packets of this worker did not come; poll_send will offer their chunks again.
  enum class Outcome : std::uint8_t { dropped, received, mismatch, nack };
  struct Received {
    Outcome outcome = Outcome::dropped;
    Drop drop = Drop::none;
    Header header;            // mismatch: the call of the other worker (header.worker)
    std::uint64_t first = 0;  // received: element offset in header.operation, header.count values
    bool finished = false;    // received: it was the operation's last chunk
    std::span<const std::byte> values;
  };
  Received handle_packet(std::span<const std::byte> bytes, std::int64_t now_ns);

  // Returns when to call poll_send for chunks that pacing holds back; -1: it holds none back.
  std::int64_t next_send_ns() const;

  // Returns when to call handle_timeout; -1: nothing is in flight.
  std::int64_t poll_timeout() const;
  void handle_timeout(std::int64_t now_ns);

  std::uint32_t in_flight() const { return flight_.count; }
  // Whether a sent chunk is not answered; otherwise no packet can matter.
  bool awaits_results() const { return base_ < next_; }
  // The rule that sets the congestion window (see above).
  enum class Control : std::uint8_t { slow_start, delay, share };
  Control control() const { return control_; }
  // Chunks that may be in flight now: 1 to W.
  std::uint32_t congestion_window() const { return congestion_window_; }
  // Answers since a timeout, all of them to probes: the next timeout sends kProbeGrowth probes for each.
  std::uint32_t probe_results() const { return probe_results_; }
  std::uint64_t oldest_outstanding() const { return base_; }
  // The first chunk of the next operation.
  std::uint64_t next_operation_chunk() const { return end_; }
  // Whether the chunk's result has come.
  bool has_result(std::uint64_t chunk) const;
  bool idle() const { return base_ == end_; }
  std::int64_t smoothed_rtt_ns() const { return smoothed_rtt_ns_; }
  std::uint64_t retransmissions() const { return retransmissions_; }
  std::uint64_t packets_sent() const { return packet_number_; }
  const WorkerConfig& config() const { return config_; }
  // Entries for chunks in flight: W rounded up to a power of two; and the entry of a chunk.
  std::uint32_t window_slots() const { return std::bit_ceil(config_.window); }
  std::uint32_t index_of(std::uint64_t chunk) const { return static_cast<std::uint32_t>(chunk) & (window_slots() - 1); }
  std::size_t packet_bytes() const { return kHeaderBytes + config_.payload_bytes; }

  bool operator==(const Worker&) const = default;
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  static constexpr std::uint32_t kNone = IndexList::kNone;
  enum class State : std::uint8_t { unsent, flight, lost, received };
  struct Entry {  // of chunk c at index_of(c)
    State state = State::unsent;
    bool again = false;
    bool probe = false;     // sent again because of a timeout, not of a gap
    bool complete = false;  // a skipped answer's number fits this chunk: the switch has the result
    bool suspect = false;   // the answer to this send may be the one whose number was skipped
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
    std::uint64_t send_number = 0;
    std::int64_t sent_ns = 0;
    bool operator==(const Entry&) const = default;
  };
  struct Placement {  // of an operation in the chunk sequence
    Operation operation;
    std::uint64_t first_chunk = 0;
    std::uint64_t chunk_count = 0;
    std::uint64_t received = 0;   // chunks
    std::uint64_t per_chunk = 0;  // elements
    bool operator==(const Placement&) const = default;
  };

  void mark_lost(std::uint32_t index, bool probe);
  bool has_room() const;
  Received handle_nack(const Header& header);
  void note_skipped(const Header& header, const Entry& received_entry, bool first_try);
  void note_path(std::int64_t rtt_ns);
  void end_round();
  std::uint64_t shorter_queue_window();
  std::uint64_t share_window();
  void begin_trial();
  std::uint64_t end_trial();
  bool pace(std::int64_t now_ns);
  void measure(std::int64_t rtt_ns);
  const Placement* placement_of(std::uint64_t chunk) const;
  std::int64_t base_timeout_ns() const;
  std::int64_t repair_timeout_ns() const;
  std::int64_t timeout_ns() const;
  std::uint64_t chunk_at(std::uint32_t index) const;
  std::uint16_t count_of(const Placement& placement, std::uint64_t chunk) const;

  WorkerConfig config_;
  std::vector<Entry> entries_;
  IndexList flight_;  // in the order of sending; at most W, as in lost_
  IndexList lost_;
  std::array<Placement, kMaxOperations> placements_;  // the first operation_count_, in order
  std::size_t operation_count_ = 0;
  std::uint64_t base_ = 0;  // lowest chunk without an answer
  std::uint64_t next_ = 0;  // lowest chunk never sent
  std::uint64_t end_ = 0;   // first chunk after the last operation
  std::uint64_t packet_number_ = 0;
  std::uint64_t highest_received_send_ = 0;  // among chunks that were sent once
  std::uint64_t newest_result_ = 0;          // highest packet number among the switch's results
  bool result_skipped_ = false;              // since the answer to highest_received_send_
  std::uint64_t retransmissions_ = 0;
  std::int64_t smoothed_rtt_ns_ = 0;
  std::int64_t rtt_variation_ns_ = 0;
  std::uint32_t congestion_window_ = 0;
  std::uint64_t paused_send_ = 0;  // up to this send a timeout came between: round trips do not measure the path
  std::int64_t least_rtt_ns_ = 0;  // 0: not measured
  Control control_ = Control::slow_start;
  std::uint32_t trial_window_ = 0;  // the window before the trial; 0: no trial
  std::int64_t trial_rtt_ns_ = 0;   // the least round trip before the trial
  std::uint32_t trial_rounds_ = 0;  // round trips of the trial with at most half the window
  std::int64_t queue_target_ns_ = kQueueTargetNs;
  std::uint32_t rounds_ = 0;          // under Control::share, since the last trial
  std::uint32_t unmoved_trials_ = 0;  // in succession (kUnmovedTrials)
  std::int64_t paced_ns_ = 0;         // the pace is used up to this time
  std::uint64_t round_start_ = 0;  // packet_number_ when the round trip began; it ends with an answer to a later send
  std::uint64_t round_lost_ = 0;   // losses found in this round trip
  std::int64_t round_least_rtt_ns_ = 0;  // 0: none measured in this round trip
  std::uint32_t backoff_ = 0;            // timeouts since the last answer
  std::uint32_t probe_results_ = 0;      // since the last answer to a chunk that was sent once
  std::int64_t timer_start_ns_ = 0;
};

}  // namespace netfold::protocol
