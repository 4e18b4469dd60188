// The worker's half of aggregation: which chunk to send now, and what an answer means.
//
// Theory of operation. A group's operations are laid end to end on one endless line of chunks. The worker
// keeps at most W of them in flight: chunk c goes out only when every chunk up to c - W is answered (the
// switch's proof rests on this). Operations follow each other through the window with no barrier between.
//
//   chunk state   event                                        becomes      action
//   (unsent)      both windows have room, poll_send            in flight    send
//   in flight     its answer                                   received     deliver values
//   in flight     a NACK: this send did not reach the switch lost         -
//   in flight     passed over, and its answer was skipped      lost         -
//   in flight     passed over, and overdue by a repair         lost         -
//   in flight     oldest, and no answer for one timeout        lost         - (timeout doubles)
//   in flight     overdue, and nothing but an answer to a      lost         - (kProbeGrowth a probe)
//                 probe came for kProbeWaitNs
//   lost          poll_send                                    in flight    send again
//   lost          its answer                                   received     deliver values
//   received      every chunk before it received too           (forgotten)  window moves
//
// Losses are found by what came later, at both ends, and the timer only catches the tail. A contribution that did not
// come shows at the switch as a gap in this worker's packet numbers, and the switch tells it, and it alone, by a
// NACK (gap_detector.hpp). A lost answer shows here: the switch numbers its answers in the order in which chunks are
// complete, so a number that is skipped between the answers to sends s and t was, most likely, for a chunk sent between
// them, else for one that had been passed over before. It is asked for again once answers to kReorderThreshold later
// sends passed it over, and again where they pass over that send too, since the switch answers it at once. A chunk that
// is passed over while no number is missing waits for another worker's repair, and only where that takes longer than
// repairs do is it sent once more (a NACK may be lost too). A chunk that is sent again has a new packet number and a new
// place in the order of sending, so a second loss of its contribution is found like the first.
//
// A straggler looks like a loss to everybody else: so a timeout sends one chunk again, as a probe, and backs off. When
// a probe is answered, and nothing else is, what is overdue follows, twice as much each round trip: a whole lost window
// is repaired in log2(W) of them. Where the timeout was wrong, since the switch or the path paused, the other answers
// are right behind the probe's, and that is waited for. A duplicate changes nothing at the switch, but costs the wire.
//
// Within W, a congestion window bounds what is in flight. It is set once a round trip, by one of three controls:
//
//   control      sets the window                                      until
//   slow_start   from kLeastWindow, twice as large each round trip    a queue, or many losses (as TCP's)
//   delay        larger by kWindowGrowth; with a queue, smaller by    a window of half the size leaves the queue as
//                what the queue holds beyond kQueueTargetNs           long as before: it is another flow's
//   share        larger or smaller after each trial, towards three    the queue is ours alone, or short, or it is the
//                eighths of what the link takes                       path that became longer
//
// Many losses are more than one packet in kLossTolerance, and more than kFewLosses; they take three tenths of the
// window, and a tenth under Control::share, where trials tell what is ours. Fewer say nothing of a queue, and answering
// them by sending less would only add to what they cost. A queue is what the quickest answer of a round trip takes
// beyond the least that was ever seen: a queue at the switch's end of the path, at this end, or of contributions that
// wait in slots for a worker that is a little behind. What was in flight at a timeout does not count: that was a
// straggler, or a loss. Jobs that share a port all see its queue, and all share it. W exceeds what is in flight by
// enough to go on sending while the oldest chunk is repaired.
//
// A flow that fills the queue until it overflows, as TCP does, would take all of the link from one that keeps the queue
// short. So Control::share asks what part of the link is ours, whatever the least round trip is: a trial halves the
// window for kTrialRounds. Alone, the round trip is halved too; beside others it is shorter by half our share of it (as
// Nimbus, Goyal et al. 2018, tells flows that give way from others; Copa, Arun and Balakrishnan, NSDI 2018,
// section 2.2, has two modes as well, but tells them by whether the queue ever empties). Below three eighths the window
// grows, above them it shrinks: a flow that takes what a trial leaves free makes our share look smaller than it is.
// A delay that changes by at most an eighth with the window in kUnmovedTrials trials is the path's own.
//
// Pacing. A larger window than kLeastWindow is not sent at once: new chunks leave at most at kPacePercent of the window
// a round trip, with bursts of kBurstNs or a quarter of a round trip. So a whole window that is free after a pause is
// spread over most of a round trip, and a path that answers within kBurstNs needs no timer.
//
// The machine holds no values: the caller encodes what `Send` names and decodes what `Received` names. Like
// its counterpart it is a value (copyable, comparable, canonical bytes) with no socket, clock or thread, and
// allocates only when it is made.
#pragma once

#include <netfold/protocol/gap_detector.hpp>
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
  // Operations that may be under way at once.
  static constexpr std::size_t kMaxOperations = 16;
  static constexpr std::int64_t kInitialTimeoutNs = 50'000'000;
  static constexpr std::int64_t kMinTimeoutNs = 10'000'000;
  static constexpr std::int64_t kMaxTimeoutNs = 200'000'000;
  // Overdue chunks that follow the answer to a probe, as probes themselves, and after what silence.
  static constexpr std::uint32_t kProbeGrowth = 2;
  static constexpr std::int64_t kProbeWaitNs = 2'000'000;
  // What a path's queue may add to a round trip. It feeds the link while a host's cores are busy with something else
  // for a while. Linux lets one TCP flow have 1 to 2.6 ms of its own host's queue (TCP small queues: a millisecond at
  // its rate, but two segments of up to 64 KB), so a longer target would take the link from it, and a shorter one leave
  // it.
  static constexpr std::int64_t kQueueTargetNs = 3'500'000;
  // The same while a host algorithm of the same operation uses the path: its queue is the operation's own, and giving
  // way to it would leave the switch's part behind.
  static constexpr std::int64_t kOwnQueueTargetNs = 28'000'000;
  // Round trips that a trial takes, and those between two under Control::share: the window is then half as large in one
  // round trip of five.
  static constexpr std::uint32_t kTrialRounds = 2;
  static constexpr std::uint32_t kRoundsBetweenTrials = 8;
  // So many trials in succession, each with a larger window, with no more than an eighth of the link found to be ours.
  static constexpr std::uint32_t kUnmovedTrials = 4;
  // Losses up to one in so many, and so few in a round trip, are not taken for congestion.
  static constexpr std::uint64_t kLossTolerance = 16;
  static constexpr std::uint64_t kFewLosses = 2;
  // Chunks: what the congestion window grows by each round trip, what it begins with and the least that it shrinks to,
  // and to what a trial may. With less in flight than kReorderThreshold, and some to be lost, nothing would tell of a
  // loss but the timer.
  static constexpr std::uint32_t kWindowGrowth = 8;
  static constexpr std::uint32_t kLeastWindow = 4 * kReorderThreshold;
  static constexpr std::uint32_t kLeastTrialWindow = kLeastWindow / 2;
  // Of the window a round trip: room to grow, as TCP's pacing leaves it. What may go at once after a pause; a sender
  // that waits for less would need a timer for every few packets.
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
    std::uint32_t size_digest = 0;  // not 0: the header's `elements`, for their number
    bool operator==(const Operation&) const = default;
  };
  bool can_start() const { return operation_count_ < kMaxOperations; }
  // Appends an operation to the line; it must be the same, in the same order, on every worker. Precondition:
  // can_start().
  void start(const Operation& operation);

  // What this worker says of a chunk, of those from the lowest unanswered to the last of an operation.
  CallDescriptor descriptor_at(std::uint64_t chunk) const;

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
  // Whether a host algorithm of the same operation uses the path now (kOwnQueueTargetNs).
  void share_path(bool with_own) { queue_target_ns_ = with_own ? kOwnQueueTargetNs : kQueueTargetNs; }
  // How many chunks could be sent without further answers or timeouts (lost ones included), as pacing lets them.
  std::uint32_t sendable() const;

  // NACK: packets of ours did not come; what they carried will be offered again.
  enum class Outcome : std::uint8_t { dropped, received, mismatch, nack };
  struct Received {
    Outcome outcome = Outcome::dropped;
    Drop drop = Drop::none;
    Header header;            // mismatch: what the other worker (header.worker) asked for
    std::uint64_t first = 0;  // received: element offset in header.operation, header.count values
    bool finished = false;    // received: it was the operation's last
    std::span<const std::byte> values;
  };
  Received handle_packet(std::span<const std::byte> bytes, std::int64_t now_ns);

  // When poll_send should be called for what pacing holds back, or -1 when it holds nothing back.
  std::int64_t next_send_ns() const;

  // When handle_timeout should be called, or -1 when nothing is in flight.
  std::int64_t poll_timeout() const;
  void handle_timeout(std::int64_t now_ns);

  std::uint32_t in_flight() const { return flight_.count; }
  // Whether something was sent that is not answered: else no packet can matter.
  bool awaits_results() const { return base_ < next_; }
  // The rule that sets the congestion window; see the top.
  enum class Control : std::uint8_t { slow_start, delay, share };
  Control control() const { return control_; }
  // Chunks that may be in flight now, 1 to W.
  std::uint32_t congestion_window() const { return congestion_window_; }
  // Answers to probes, and to nothing else, since a timeout: the next one is a growth (kProbeGrowth for each).
  std::uint32_t probe_results() const { return probe_results_; }
  std::uint64_t oldest_outstanding() const { return base_; }
  // The chunk that the next operation will begin with.
  std::uint64_t next_operation_chunk() const { return end_; }
  // Whether its result came, at any time.
  bool has_result(std::uint64_t chunk) const;
  bool idle() const { return base_ == end_; }
  std::int64_t smoothed_rtt_ns() const { return smoothed_rtt_ns_; }
  std::uint64_t retransmissions() const { return retransmissions_; }
  std::uint64_t packets_sent() const { return packet_number_; }
  const WorkerConfig& config() const { return config_; }
  // Places for chunks: as many as may be in flight, or the next power of two; and which of them is a chunk's.
  std::uint32_t window_slots() const { return std::bit_ceil(config_.window); }
  std::uint32_t index_of(std::uint64_t chunk) const { return static_cast<std::uint32_t>(chunk) & (window_slots() - 1); }
  std::size_t packet_bytes() const { return kHeaderBytes + config_.payload_bytes; }

  bool operator==(const Worker&) const = default;
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  enum class State : std::uint8_t { unsent, flight, lost, received };
  struct Entry {  // of chunk c at index c mod W
    State state = State::unsent;
    bool again = false;
    bool probe = false;     // sent again by the timer's doing, not a gap's
    bool complete = false;  // the number of an answer that did not come lies where its would: the switch has the result
    bool suspect = false;   // this send's answer may be the one whose number was skipped
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
  struct Placement {  // where an operation lies on the line of chunks
    Operation operation;
    std::uint64_t first_chunk = 0;
    std::uint64_t chunk_count = 0;
    std::uint64_t received = 0;
    std::uint64_t per_chunk = 0;  // elements
    bool operator==(const Placement&) const = default;
  };

  void push_back(List& list, std::uint32_t index);
  void unlink(List& list, std::uint32_t index);
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
  List flight_;
  List lost_;
  std::array<Placement, kMaxOperations> placements_;  // the first operation_count_, in order
  std::size_t operation_count_ = 0;
  std::uint64_t base_ = 0;  // lowest chunk without an answer
  std::uint64_t next_ = 0;  // lowest chunk never sent
  std::uint64_t end_ = 0;   // first chunk after the last operation
  std::uint64_t packet_number_ = 0;
  std::uint64_t highest_received_send_ = 0;  // of chunks that were sent once
  std::uint64_t newest_result_ = 0;          // the switch's number of it
  bool result_skipped_ = false;              // since the answer to highest_received_send_
  std::uint64_t retransmissions_ = 0;
  std::int64_t smoothed_rtt_ns_ = 0;
  std::int64_t rtt_variation_ns_ = 0;
  std::uint32_t congestion_window_ = 0;
  std::uint64_t paused_send_ = 0;  // up to here round trips say nothing of the path: a timeout came between
  std::int64_t least_rtt_ns_ = 0;  // 0: not known
  Control control_ = Control::slow_start;
  std::uint32_t trial_window_ = 0;  // the window before the trial; 0: there is none
  std::int64_t trial_rtt_ns_ = 0;   // the least round trip then
  std::uint32_t trial_rounds_ = 0;  // of it, with at most half the window
  std::int64_t queue_target_ns_ = kQueueTargetNs;
  std::uint32_t rounds_ = 0;          // under Control::share, since the last trial
  std::uint32_t unmoved_trials_ = 0;  // in succession
  std::int64_t paced_ns_ = 0;         // up to when the pace has been used
  std::uint64_t round_start_ = 0;  // packet_number_ when the round trip began; it ends with an answer to a later send
  std::uint64_t round_lost_ = 0;   // found in it
  std::int64_t round_least_rtt_ns_ = 0;  // of it; 0: none
  std::uint32_t backoff_ = 0;            // timeouts since the last answer
  std::uint32_t probe_results_ = 0;      // since an answer to a chunk that was sent once
  std::int64_t timer_start_ns_ = 0;
};

}  // namespace netfold::protocol
