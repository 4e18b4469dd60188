#include <netfold/kernels/reduce.hpp>
#include <netfold/protocol/canonical.hpp>
#include <netfold/protocol/worker.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace netfold::protocol {

Worker::Worker(const WorkerConfig& config) : config_(config) {
  if (config.workers == 0 || config.worker >= config.workers) {
    throw std::invalid_argument("a worker's index is below the job's number of workers");
  }
  if (config.window == 0 || config.window > kMaxWindow) {
    throw std::invalid_argument("a window is 1 to " + std::to_string(kMaxWindow) + " chunks, not " +
                                std::to_string(config.window));
  }
  if (config.payload_bytes == 0 || config.payload_bytes % 8 != 0 || config.payload_bytes > kMaxPayloadBytes) {
    throw std::invalid_argument("payload_bytes is a multiple of 8, up to the protocol's bound");
  }
  entries_.resize(window_slots());
  congestion_window_ = std::min(kLeastWindow, config.window);
}

void Worker::start(const Operation& operation) {
  if (!can_start() || operation.elements == 0) {
    throw std::invalid_argument("start: too many operations under way, or none of its elements to send");
  }
  Placement placement{.operation = operation, .first_chunk = end_};
  placement.per_chunk = config_.payload_bytes / kernels::element_bytes(operation.wire);
  placement.chunk_count = (operation.elements + placement.per_chunk - 1) / placement.per_chunk;
  placements_[operation_count_] = placement;
  ++operation_count_;
  end_ += placement.chunk_count;
}

std::uint32_t Worker::sendable() const {
  const std::uint64_t limit = std::min(end_, base_ + config_.window);
  const std::uint64_t waiting = lost_.count + (limit - next_);
  std::uint64_t room = congestion_window_ > flight_.count ? congestion_window_ - flight_.count : 0;
  if (backoff_ > 0) room = std::max<std::uint64_t>(room, lost_.count);
  return static_cast<std::uint32_t>(std::min(waiting, room));
}

bool Worker::has_result(std::uint64_t chunk) const {
  return chunk < base_ || (chunk < next_ && entries_[index_of(chunk)].state == State::received);
}

bool Worker::has_room() const { return flight_.count < congestion_window_; }

std::optional<Worker::Send> Worker::poll_send(std::int64_t now_ns) {
  std::uint64_t chunk = 0;
  std::uint32_t index = 0;
  bool again = false;
  // After a timeout the chunks in flight count as gone from the path: they must not hold the probe back.
  if (lost_.head != kNone && (has_room() || backoff_ > 0)) {
    index = lost_.head;
    chunk = chunk_at(index);
    again = entries_[index].again;
    lost_.unlink(entries_, index);
  } else if (lost_.head == kNone && next_ < end_ && next_ < base_ + config_.window && has_room()) {
    if (!pace(now_ns)) return std::nullopt;
    chunk = next_++;
    index = index_of(chunk);
  } else {
    return std::nullopt;
  }
  if (flight_.count == 0) timer_start_ns_ = now_ns;
  Entry& entry = entries_[index];
  entry.state = State::flight;
  entry.again = again;
  entry.suspect = false;
  entry.send_number = ++packet_number_;
  entry.sent_ns = now_ns;
  flight_.push_back(entries_, index);
  retransmissions_ += again ? 1 : 0;

  const Placement& placement = *placement_of(chunk);
  Send send{.first = (chunk - placement.first_chunk) * placement.per_chunk,
            .count = count_of(placement, chunk),
            .again = again};
  send.header = Header{.job = config_.job,
                       .epoch = config_.epoch,
                       .incarnation = config_.incarnation,
                       .chunk = chunk,
                       .packet_number = packet_number_,
                       .worker = config_.worker};
  descriptor_at(chunk).fill(send.header);
  return send;
}

CallDescriptor Worker::descriptor_at(std::uint64_t chunk) const {
  const Placement& placement = *placement_of(chunk);
  const Operation& operation = placement.operation;
  return {
      .operation = operation.operation,
      .elements = operation.size_digest != 0 ? operation.size_digest : static_cast<std::uint32_t>(operation.elements),
      .count = count_of(placement, chunk),
      .wire = static_cast<std::uint8_t>(operation.wire),
      .reduce = static_cast<std::uint8_t>(operation.reduce),
      .table = operation.table};
}

void Worker::not_sent(std::uint64_t chunk) {
  if (chunk < base_ || chunk >= next_) return;
  const auto index = index_of(chunk);
  Entry& entry = entries_[index];
  if (entry.state != State::flight) return;
  // The packet never left: its next sending is no retransmission, unless this one was.
  if (entry.again) --retransmissions_;
  flight_.unlink(entries_, index);
  entry.state = State::lost;
  lost_.push_back(entries_, index);
}

Worker::Received Worker::handle_packet(std::span<const std::byte> bytes, std::int64_t now_ns) {
  Received received;
  const auto drop = [&](Drop reason) {
    received.drop = reason;
    return received;
  };
  const auto view = PacketView::parse(bytes);
  if (!view) return drop(Drop::malformed);
  const Header header = view->header();
  if (bytes.size() != packet_bytes()) return drop(Drop::length);
  if (header.job != config_.job) return drop(Drop::foreign);
  if (header.incarnation != config_.incarnation) return drop(Drop::incarnation);
  if (header.epoch != config_.epoch) return drop(Drop::epoch);
  if (!(header.flags & kFromSwitch) || (header.flags & kHello)) return drop(Drop::direction);
  if (header.worker >= config_.workers) return drop(Drop::worker);
  // As at the switch: nearly every number is a valid operator or dtype, but few pairs have a meaning.
  if (!kernels::is_defined(static_cast<kernels::ReduceOp>(header.reduce), static_cast<kernels::DType>(header.wire))) {
    return drop(Drop::malformed);
  }
  if (header.flags & kNack) return handle_nack(header);
  if (header.chunk < base_) return drop(Drop::stale);
  if (header.chunk >= next_) return drop(Drop::window);
  received.header = header;

  Placement& placement = placements_[static_cast<std::size_t>(placement_of(header.chunk) - placements_.data())];
  if (header.flags & kMismatch) {
    // Workers with the same call get this packet too, since they may be the ones that differ from the first.
    if (CallDescriptor::of(header) == descriptor_at(header.chunk)) return drop(Drop::stale);
    received.outcome = Outcome::mismatch;
    return received;
  }
  const auto index = index_of(header.chunk);
  Entry& entry = entries_[index];
  if (entry.state == State::received) return drop(Drop::duplicate);
  // The switch compared all contributions, this worker's among them: an answer that differs is for no packet of ours.
  if (header.operation != placement.operation.operation || header.count != count_of(placement, header.chunk) ||
      header.wire != static_cast<std::uint8_t>(placement.operation.wire) ||
      header.reduce != static_cast<std::uint8_t>(placement.operation.reduce)) {
    return drop(Drop::malformed);
  }

  const bool first_try = entry.state == State::flight && !entry.again;
  note_skipped(header, entry, first_try);
  (entry.state == State::flight ? flight_ : lost_).unlink(entries_, index);
  // A chunk that was sent twice measures no round trip (Karn), and does not show which send was answered.
  if (first_try) {
    measure(now_ns - entry.sent_ns);
    if (entry.send_number > paused_send_) note_path(now_ns - entry.sent_ns);
    highest_received_send_ = std::max(highest_received_send_, entry.send_number);
    if (highest_received_send_ > round_start_) end_round();
    probe_results_ = 0;
  } else if (entry.state == State::flight && entry.probe) {
    ++probe_results_;
  }
  entry.state = State::received;
  backoff_ = 0;
  timer_start_ns_ = now_ns;

  received.outcome = Outcome::received;
  received.first = (header.chunk - placement.first_chunk) * placement.per_chunk;
  received.values = view->payload().first(header.count * kernels::element_bytes(placement.operation.wire));
  received.finished = ++placement.received == placement.chunk_count;

  while (base_ < next_ && entries_[index_of(base_)].state == State::received) {
    entries_[index_of(base_)] = Entry{};
    ++base_;
  }
  while (operation_count_ > 0 && placements_[0].first_chunk + placements_[0].chunk_count <= base_) {
    // Moves at most 15 placements once per operation; a ring would make equal machines look different.
    std::move(placements_.begin() + 1, placements_.end(), placements_.begin());
    placements_.back() = Placement{};
    --operation_count_;
  }
  for (std::uint32_t at = flight_.head; at != kNone;) {
    const Entry& earlier = entries_[at];
    if (earlier.send_number + kReorderThreshold > highest_received_send_) break;
    const std::uint32_t following = earlier.next;
    if (earlier.complete || earlier.suspect || now_ns - earlier.sent_ns >= repair_timeout_ns()) mark_lost(at, false);
    at = following;
  }
  return received;
}

std::int64_t Worker::base_timeout_ns() const {
  if (smoothed_rtt_ns_ == 0) return kInitialTimeoutNs;
  return std::clamp(smoothed_rtt_ns_ + 4 * rtt_variation_ns_, kMinTimeoutNs, kMaxTimeoutNs);
}

// The time in which another worker's loss is found, by later packets, and repaired: a little more than a round trip
// more.
std::int64_t Worker::repair_timeout_ns() const {
  return std::min(kMaxTimeoutNs, base_timeout_ns() + smoothed_rtt_ns_ + smoothed_rtt_ns_ / 4);
}

std::int64_t Worker::timeout_ns() const {
  if (probe_results_ > 0) return kProbeWaitNs;
  return std::min(kMaxTimeoutNs, base_timeout_ns() << std::min<std::uint32_t>(backoff_, 8));
}

std::int64_t Worker::poll_timeout() const { return flight_.count == 0 ? -1 : timer_start_ns_ + timeout_ns(); }

std::int64_t Worker::next_send_ns() const {
  const bool waits = lost_.head == kNone && next_ < end_ && next_ < base_ + config_.window && has_room() &&
                     congestion_window_ > kLeastWindow;
  return waits ? paced_ns_ + kBurstNs / 2 : -1;
}

void Worker::handle_timeout(std::int64_t now_ns) {
  if (flight_.count == 0 || now_ns < poll_timeout()) return;
  timer_start_ns_ = now_ns;
  paused_send_ = packet_number_;
  if (probe_results_ == 0) {
    mark_lost(flight_.head, true);
    ++backoff_;
    return;
  }
  for (std::uint32_t left = kProbeGrowth * probe_results_; left > 0 && flight_.head != kNone; --left) {
    if (now_ns - entries_[flight_.head].sent_ns < base_timeout_ns()) break;
    mark_lost(flight_.head, true);
  }
  probe_results_ = 0;
}

void Worker::mark_lost(std::uint32_t index, bool probe) {
  flight_.unlink(entries_, index);
  entries_[index].state = State::lost;
  entries_[index].again = true;
  entries_[index].probe = probe;
  // A probe may be for a straggler's chunk, which is no loss of the path.
  if (!probe) ++round_lost_;
  lost_.push_back(entries_, index);
}

Worker::Received Worker::handle_nack(const Header& header) {
  Received received;
  const auto drop = [&](Drop reason) {
    received.drop = reason;
    return received;
  };
  if (header.worker != config_.worker) return drop(Drop::worker);
  if (header.count != 0 || header.elements == 0) return drop(Drop::malformed);
  for (std::uint32_t at = flight_.head; at != kNone;) {
    const std::uint64_t send_number = entries_[at].send_number;
    const std::uint32_t following = entries_[at].next;
    if (send_number >= header.chunk) {
      if (send_number - header.chunk >= header.elements) break;
      mark_lost(at, false);
      received.outcome = Outcome::nack;
    }
    at = following;
  }
  // All answered or sent again since: the NACK came late, or named packets that never left.
  if (received.outcome != Outcome::nack) return drop(Drop::stale);
  received.header = header;
  return received;
}

// The switch numbers answers in the order in which chunks become complete. A skipped number was most likely for a chunk
// that was sent between the chunks that were answered before and after it. Where no chunk between them is unanswered,
// the number was for a chunk that had been passed over and waited for a repair.
void Worker::note_skipped(const Header& header, const Entry& received_entry, bool first_try) {
  if (header.packet_number <= newest_result_) return;
  result_skipped_ = result_skipped_ || header.packet_number != newest_result_ + 1;
  newest_result_ = header.packet_number;
  if (!first_try) return;  // the order of sending does not show which send was answered
  if (result_skipped_) {
    bool between = false;
    for (std::uint32_t at = received_entry.previous; at != kNone; at = entries_[at].previous) {
      const bool passed_over = entries_[at].send_number <= highest_received_send_;
      if (passed_over && between) break;
      between = !passed_over;
      (passed_over ? entries_[at].suspect : entries_[at].complete) = true;
    }
  }
  result_skipped_ = false;
}

void Worker::note_path(std::int64_t rtt_ns) {
  rtt_ns = std::max<std::int64_t>(rtt_ns, 1);
  const auto lower = [rtt_ns](std::int64_t least_ns) { return least_ns == 0 ? rtt_ns : std::min(least_ns, rtt_ns); };
  least_rtt_ns_ = lower(least_rtt_ns_);
  round_least_rtt_ns_ = lower(round_least_rtt_ns_);
}

// Decides once a round trip; the next decision judges the packets that are sent after this one.
void Worker::end_round() {
  const std::uint64_t window = congestion_window_;
  const bool more = next_ < end_;  // otherwise the application held the window back, and nothing was tried
  std::uint64_t wanted = window;
  if (round_lost_ > kFewLosses && round_lost_ * kLossTolerance > packet_number_ - round_start_) {
    const std::uint64_t tenths = control_ == Control::share ? 9 : 7;
    wanted = std::max<std::uint64_t>(window, trial_window_) * tenths / 10;
    trial_window_ = 0;
    if (control_ == Control::slow_start) control_ = Control::delay;
  } else if (control_ == Control::share) {
    if (more) wanted = share_window();
  } else if (round_least_rtt_ns_ > least_rtt_ns_ + queue_target_ns_) {
    // In slow start this round trip is that of the window before it was doubled: it begins no trial.
    wanted = control_ == Control::slow_start ? window / 2 : shorter_queue_window();
    if (control_ == Control::slow_start) control_ = Control::delay;
  } else {
    // A trial goes on until the window is as large again: another flow may fill the queue to just below the target.
    if (window >= trial_window_) trial_window_ = 0;
    if (more) wanted = control_ == Control::slow_start ? 2 * window : window + kWindowGrowth;
  }
  const bool smaller = trial_window_ != 0 && wanted <= window;
  const std::uint64_t least = std::min(smaller ? kLeastTrialWindow : kLeastWindow, config_.window);
  congestion_window_ = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, least, config_.window));
  round_start_ = packet_number_;
  round_lost_ = 0;
  round_least_rtt_ns_ = 0;
}

// Control::delay with a queue above the target: the window shrinks by the queue's excess, down to half the window at
// which the queue was first seen. Where that does not shorten the queue, a trial decides.
std::uint64_t Worker::shorter_queue_window() {
  const std::uint64_t window = congestion_window_;
  if (trial_window_ == 0) begin_trial();
  if (window > trial_window_ / 2) {
    const auto target_ns = static_cast<std::uint64_t>(least_rtt_ns_ + queue_target_ns_);
    return std::max(window / 2, window * target_ns / static_cast<std::uint64_t>(round_least_rtt_ns_));
  }
  return ++trial_rounds_ < kTrialRounds ? window : end_trial();
}

std::uint64_t Worker::share_window() {
  const std::uint64_t window = congestion_window_;
  if (trial_window_ != 0) return ++trial_rounds_ < kTrialRounds ? window : end_trial();
  if (++rounds_ < kRoundsBetweenTrials || round_least_rtt_ns_ == 0) return window;
  begin_trial();
  return window / 2;
}

void Worker::begin_trial() {
  trial_window_ = congestion_window_;
  trial_rtt_ns_ = round_least_rtt_ns_;
  trial_rounds_ = 0;
}

// With w chunks of ours and q of others in flight, a link of C chunks per second answers after (w + q) / C. So the ratio
// of the round trip's relative decrease to the window's relative decrease is w / (w + q): our share.
std::uint64_t Worker::end_trial() {
  const std::uint64_t before = trial_window_;
  const std::int64_t rtt_ns = round_least_rtt_ns_;
  const std::int64_t ours = (trial_rtt_ns_ - rtt_ns) * static_cast<std::int64_t>(before);
  const std::int64_t all = trial_rtt_ns_ * static_cast<std::int64_t>(before - congestion_window_);
  trial_window_ = 0;
  rounds_ = 0;
  if (rtt_ns == 0 || all == 0) return before;  // no round trip measured, or W of one chunk

  const std::int64_t eighths = std::clamp<std::int64_t>(8 * ours / all, 0, 8);
  unmoved_trials_ = eighths == 0 ? unmoved_trials_ + 1 : 0;
  if (rtt_ns <= least_rtt_ns_ + queue_target_ns_ || eighths >= 7 || unmoved_trials_ == kUnmovedTrials) {
    control_ = Control::delay;
    if (unmoved_trials_ == kUnmovedTrials) least_rtt_ns_ = rtt_ns;
    unmoved_trials_ = 0;
    return eighths >= 7 ? congestion_window_ : before;
  }
  control_ = Control::share;
  static constexpr std::array<std::uint64_t, 7> kFactors{10, 10, 9, 7, 7, 6, 5};  // in eighths, by our share in eighths
  return before * kFactors[static_cast<std::size_t>(eighths)] / 8;
}

// Charges one chunk to the pace: a round trip divided by the window, less what the window needs to grow. False: too
// early.
bool Worker::pace(std::int64_t now_ns) {
  if (congestion_window_ <= kLeastWindow || smoothed_rtt_ns_ == 0) return true;
  paced_ns_ = std::max(paced_ns_, now_ns - std::max(kBurstNs, smoothed_rtt_ns_ / 4));
  if (paced_ns_ > now_ns) return false;
  const std::int64_t percent = control_ == Control::slow_start ? kSlowStartPacePercent : kPacePercent;
  paced_ns_ += 100 * smoothed_rtt_ns_ / (percent * congestion_window_);
  return true;
}

// RFC 6298, section 2, in nanoseconds.
void Worker::measure(std::int64_t rtt_ns) {
  if (smoothed_rtt_ns_ == 0) {
    smoothed_rtt_ns_ = std::max<std::int64_t>(rtt_ns, 1);
    rtt_variation_ns_ = rtt_ns / 2;
    return;
  }
  rtt_variation_ns_ += (std::abs(smoothed_rtt_ns_ - rtt_ns) - rtt_variation_ns_) / 4;
  smoothed_rtt_ns_ += (rtt_ns - smoothed_rtt_ns_) / 8;
  smoothed_rtt_ns_ = std::max<std::int64_t>(smoothed_rtt_ns_, 1);
}

const Worker::Placement* Worker::placement_of(std::uint64_t chunk) const {
  for (std::size_t i = 0; i < operation_count_; ++i) {
    const Placement& placement = placements_[i];
    if (chunk < placement.first_chunk + placement.chunk_count) return &placement;
  }
  return nullptr;  // unreachable: chunks in [base, end) belong to an operation
}

std::uint16_t Worker::count_of(const Placement& placement, std::uint64_t chunk) const {
  const std::uint64_t first = (chunk - placement.first_chunk) * placement.per_chunk;
  return static_cast<std::uint16_t>(std::min(placement.per_chunk, placement.operation.elements - first));
}

std::uint64_t Worker::chunk_at(std::uint32_t index) const {
  // The one chunk of [base, base + W) with this residue.
  return base_ + index_of(index - base_);
}

void Worker::append_canonical(std::vector<std::byte>& out) const {
  append_values(out, config_.job, config_.epoch, config_.incarnation, config_.worker, config_.workers, config_.window,
                config_.payload_bytes);
  append_values(out, base_, next_, end_, packet_number_, highest_received_send_, newest_result_, result_skipped_,
                retransmissions_, smoothed_rtt_ns_, rtt_variation_ns_, congestion_window_, paused_send_, least_rtt_ns_,
                control_, trial_window_, trial_rtt_ns_, trial_rounds_, rounds_, queue_target_ns_, unmoved_trials_,
                paced_ns_, round_start_, round_lost_, round_least_rtt_ns_, backoff_, probe_results_, timer_start_ns_);
  for (const Entry& entry : entries_) {
    append_values(out, entry.state, entry.again, entry.probe, entry.complete, entry.suspect, entry.previous, entry.next,
                  entry.send_number, entry.sent_ns);
  }
  for (std::size_t i = 0; i < operation_count_; ++i) {
    const Placement& placement = placements_[i];
    const Operation& operation = placement.operation;
    append_values(out, operation.operation, operation.elements, operation.wire, operation.reduce, operation.table,
                  operation.size_digest, placement.first_chunk, placement.received);
  }
}

}  // namespace netfold::protocol
