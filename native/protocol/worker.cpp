#include <netfold/kernels/reduce.hpp>
#include <netfold/protocol/worker.hpp>

#include <algorithm>
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
  entries_.resize(config.window);
}

void Worker::start(const Operation& operation) {
  if (!can_start() || operation.elements == 0) {
    throw std::invalid_argument("start: too many operations under way, or none of its elements to send");
  }
  Line line{.operation = operation, .first_chunk = end_};
  line.per_chunk = config_.payload_bytes / kernels::element_bytes(operation.wire);
  line.chunk_count = (operation.elements + line.per_chunk - 1) / line.per_chunk;
  lines_[operation_count_] = line;
  ++operation_count_;
  end_ += line.chunk_count;
}

std::uint32_t Worker::sendable() const {
  const std::uint64_t limit = std::min(end_, base_ + config_.window);
  return lost_.count + static_cast<std::uint32_t>(limit - next_);
}

std::optional<Worker::Send> Worker::poll_send(std::int64_t now_ns) {
  std::uint64_t chunk = 0;
  std::uint32_t index = 0;
  bool again = false;
  if (lost_.head != kNone) {
    index = lost_.head;
    chunk = chunk_at(index);
    again = entries_[index].again;
    unlink(lost_, index);
  } else if (next_ < end_ && next_ < base_ + config_.window) {
    chunk = next_++;
    index = static_cast<std::uint32_t>(chunk % config_.window);
  } else {
    return std::nullopt;
  }
  if (flight_.count == 0) timer_start_ns_ = now_ns;
  Entry& entry = entries_[index];
  entry.state = State::flight;
  entry.again = again;
  entry.send_number = ++counter_;
  entry.sent_ns = now_ns;
  push_back(flight_, index);
  retransmissions_ += again ? 1 : 0;

  const Line& line = *line_of(chunk);
  Send send{.first = (chunk - line.first_chunk) * line.per_chunk, .count = count_of(line, chunk), .again = again};
  send.header = Header{.job = config_.job,
                       .epoch = config_.epoch,
                       .incarnation = config_.incarnation,
                       .chunk = chunk,
                       .counter = counter_,
                       .operation = line.operation.operation,
                       .elements = static_cast<std::uint32_t>(line.operation.elements),
                       .worker = config_.worker,
                       .count = send.count,
                       .wire = static_cast<std::uint8_t>(line.operation.wire),
                       .reduce = static_cast<std::uint8_t>(line.operation.reduce),
                       .table = line.operation.table};
  return send;
}

void Worker::not_sent(std::uint64_t chunk) {
  if (chunk < base_ || chunk >= next_) return;
  const auto index = static_cast<std::uint32_t>(chunk % config_.window);
  Entry& entry = entries_[index];
  if (entry.state != State::flight) return;
  // It never left, so it is no retransmission when it does (unless it already was one).
  if (entry.again) --retransmissions_;
  unlink(flight_, index);
  entry.state = State::lost;
  push_back(lost_, index);
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
  if (!(header.flags & kAnswer) || (header.flags & kHello)) return drop(Drop::direction);
  if (header.worker >= config_.workers) return drop(Drop::worker);
  // As the switch does: hardly a number is free in the two bytes, but few pairs have a meaning.
  if (!kernels::is_defined(static_cast<kernels::ReduceOp>(header.reduce), static_cast<kernels::DType>(header.wire))) {
    return drop(Drop::malformed);
  }
  if (header.chunk < base_) return drop(Drop::stale);
  if (header.chunk >= next_) return drop(Drop::window);
  received.header = header;

  Line& line = *line_of(header.chunk);
  if (header.flags & kMismatch) {
    received.outcome = Outcome::mismatch;
    return received;
  }
  const auto index = static_cast<std::uint32_t>(header.chunk % config_.window);
  Entry& entry = entries_[index];
  if (entry.state == State::answered) return drop(Drop::duplicate);
  // The switch compared all contributions, ours among them, so an answer that differs is not for what we
  // sent.
  if (header.operation != line.operation.operation || header.count != count_of(line, header.chunk) ||
      header.wire != static_cast<std::uint8_t>(line.operation.wire) ||
      header.reduce != static_cast<std::uint8_t>(line.operation.reduce)) {
    return drop(Drop::malformed);
  }

  const bool was_probe = entry.probe;
  const bool first_try = entry.state == State::flight && !entry.again;
  const std::uint64_t send_number = entry.send_number;
  unlink(entry.state == State::flight ? flight_ : lost_, index);
  // A chunk that was sent twice says nothing about the round trip (Karn), nor about which send was answered.
  if (first_try) {
    measure(now_ns - entry.sent_ns);
    highest_answered_send_ = std::max(highest_answered_send_, send_number);
  }
  entry.state = State::answered;
  backoff_ = 0;
  timer_start_ns_ = now_ns;

  received.outcome = Outcome::received;
  received.first = (header.chunk - line.first_chunk) * line.per_chunk;
  received.values = view->payload().first(header.count * kernels::element_bytes(line.operation.wire));
  received.finished = ++line.answered == line.chunk_count;

  while (base_ < next_ && entries_[base_ % config_.window].state == State::answered) {
    entries_[base_ % config_.window] = Entry{};
    ++base_;
  }
  while (operation_count_ > 0 && lines_[0].first_chunk + lines_[0].chunk_count <= base_) {
    // At most 16 of them, once an operation: a ring would make equal machines look different.
    std::move(lines_.begin() + 1, lines_.end(), lines_.begin());
    lines_.back() = Line{};
    --operation_count_;
  }
  for (std::uint32_t at = flight_.head; at != kNone;) {
    const Entry& earlier = entries_[at];
    if (earlier.send_number + kReorderThreshold > highest_answered_send_) break;
    const std::uint32_t following = earlier.next;
    if (!earlier.again || now_ns - earlier.sent_ns >= base_timeout_ns()) mark_lost(at, false);
    at = following;
  }
  if (was_probe) {
    for (std::uint32_t i = 0; i < kProbeGrowth && flight_.head != kNone; ++i) {
      if (now_ns - entries_[flight_.head].sent_ns < base_timeout_ns()) break;
      mark_lost(flight_.head, true);
    }
  }
  return received;
}

std::int64_t Worker::base_timeout_ns() const {
  if (smoothed_rtt_ns_ == 0) return kInitialTimeoutNs;
  return std::clamp(smoothed_rtt_ns_ + 4 * rtt_variation_ns_, kMinTimeoutNs, kMaxTimeoutNs);
}

std::int64_t Worker::timeout_ns() const {
  return std::min(kMaxTimeoutNs, base_timeout_ns() << std::min<std::uint32_t>(backoff_, 8));
}

std::int64_t Worker::poll_timeout() const { return flight_.count == 0 ? -1 : timer_start_ns_ + timeout_ns(); }

void Worker::handle_timeout(std::int64_t now_ns) {
  if (flight_.count == 0 || now_ns < poll_timeout()) return;
  mark_lost(flight_.head, true);
  ++backoff_;
  timer_start_ns_ = now_ns;
}

void Worker::mark_lost(std::uint32_t index, bool probe) {
  unlink(flight_, index);
  entries_[index].state = State::lost;
  entries_[index].again = true;
  entries_[index].probe = probe;
  push_back(lost_, index);
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

Worker::Line* Worker::line_of(std::uint64_t chunk) {
  for (std::size_t i = 0; i < operation_count_; ++i) {
    Line& line = lines_[i];
    if (chunk < line.first_chunk + line.chunk_count) return &line;
  }
  return nullptr;  // unreachable: chunks in [base, end) belong to an operation
}

std::uint16_t Worker::count_of(const Line& line, std::uint64_t chunk) const {
  const std::uint64_t first = (chunk - line.first_chunk) * line.per_chunk;
  return static_cast<std::uint16_t>(std::min(line.per_chunk, line.operation.elements - first));
}

std::uint64_t Worker::chunk_at(std::uint32_t index) const {
  // The one chunk of [base, base + W) with this residue.
  const std::uint64_t offset = (index + config_.window - base_ % config_.window) % config_.window;
  return base_ + offset;
}

void Worker::push_back(List& list, std::uint32_t index) {
  entries_[index].previous = list.tail;
  entries_[index].next = kNone;
  if (list.tail != kNone) {
    entries_[list.tail].next = index;
  } else {
    list.head = index;
  }
  list.tail = index;
  ++list.count;
}

void Worker::unlink(List& list, std::uint32_t index) {
  Entry& entry = entries_[index];
  if (entry.previous != kNone) {
    entries_[entry.previous].next = entry.next;
  } else {
    list.head = entry.next;
  }
  if (entry.next != kNone) {
    entries_[entry.next].previous = entry.previous;
  } else {
    list.tail = entry.previous;
  }
  entry.previous = entry.next = kNone;
  --list.count;
}

void Worker::append_canonical(std::vector<std::byte>& out) const {
  const auto append = [&out](auto value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), first, first + sizeof value);
  };
  append(config_.job);
  append(config_.epoch);
  append(config_.incarnation);
  append(config_.worker);
  append(config_.workers);
  append(config_.window);
  append(config_.payload_bytes);
  append(base_);
  append(next_);
  append(end_);
  append(counter_);
  append(highest_answered_send_);
  append(retransmissions_);
  append(smoothed_rtt_ns_);
  append(rtt_variation_ns_);
  append(backoff_);
  append(timer_start_ns_);
  for (const Entry& entry : entries_) {
    append(entry.state);
    append(entry.again);
    append(entry.probe);
    append(entry.previous);
    append(entry.next);
    append(entry.send_number);
    append(entry.sent_ns);
  }
  for (std::size_t i = 0; i < operation_count_; ++i) {
    const Line& line = lines_[i];
    append(line.operation.operation);
    append(line.operation.elements);
    append(line.operation.wire);
    append(line.operation.reduce);
    append(line.operation.table);
    append(line.first_chunk);
    append(line.answered);
  }
}

}  // namespace netfold::protocol
