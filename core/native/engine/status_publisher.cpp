#include <netfold/engine/status_publisher.hpp>

#include <cstdio>

namespace netfold::engine {

StatusPublisher::StatusPublisher(std::uint64_t group, const std::string& job, int rank, int size)
    : entry_(StatusSegment::instance().open()) {
  StatusWrite status(entry_);
  if (!status) return;
  status->group = group;
  status->rank = rank;
  status->size = size;
  status->joined_ns = now_ns();
  StatusWrite::put(status->job, job.c_str());
}

void StatusPublisher::joined_switch() {
  if (StatusWrite status(entry_); status) status->with_switch = 1;
}

void StatusPublisher::publish(const UnderWay& under_way) {
  StatusWrite status(entry_);
  if (!status) return;
  status->without_switch = under_way.switch_is_lost ? 1 : 0;
  status->transfers = static_cast<std::uint32_t>(under_way.transfers);
  if (under_way.oldest_transfer != nullptr) {
    const Operation& transfer = *under_way.oldest_transfer;
    status->transfer_peer = transfer.call_.root == collective::kAnySource ? -1 : transfer.call_.root;
    status->transfer_tag = transfer.call_.tag;
    status->transfer_kind = static_cast<std::uint8_t>(transfer.call_.kind);
    status->transfer_bytes = transfer.record_.bytes;
    status->transfer_ns = transfer.record_.queued_ns;
    StatusWrite::put(status->transfer_site, transfer.site_);
  }
  status->waiting = static_cast<std::uint32_t>(under_way.collectives);
  status->sequence = 0;
  status->awaited_count = 0;
  if (under_way.oldest == nullptr) return;
  const Operation& oldest = *under_way.oldest;
  const collective::Call& call = oldest.call_;
  status->sequence = call.sequence;
  status->kind = static_cast<std::uint8_t>(call.kind);
  status->dtype = static_cast<std::uint8_t>(call.dtype);
  status->reduce = static_cast<std::uint8_t>(call.reduce);
  status->algorithm = static_cast<std::uint8_t>(call.algorithm);
  status->bytes = oldest.record_.bytes;
  status->queued_ns = oldest.record_.queued_ns;
  status->deadline_ns = oldest.deadline_ns_;
  StatusWrite::put(status->site, oldest.site_);
  if (oldest.algorithm_ == nullptr) return;
  for (const int rank : oldest.algorithm_->awaited()) {
    if (status->awaited_count < StatusEntry::kMaxAwaited) status->awaited[status->awaited_count] = rank;
    ++status->awaited_count;
  }
}

void StatusPublisher::completed(const Operation& operation, const collective::Failure& failure, std::size_t collectives,
                                std::size_t transfers) {
  StatusWrite status(entry_);
  if (!status) return;
  const EventRecord& record = operation.record_;
  status->sequence = 0;
  status->waiting = static_cast<std::uint32_t>(collectives);
  status->transfers = static_cast<std::uint32_t>(transfers);
  ++status->operations;
  status->tensor_bytes += record.bytes;
  status->wire_bytes += record.wire_bytes;
  status->retransmissions += record.retransmissions;
  // Transfers have sequence numbers of their own, which do not tell which rank is behind.
  if (!collective::is_transfer(operation.call_.kind)) {
    if (record.slowest_rank >= 0) ++status->judged;
    if (record.slowest_rank == status->rank) ++status->last;
    status->done_sequence = record.sequence;
    status->done_kind = record.operation;
    status->done_ns = record.finished_ns;
    StatusWrite::put(status->done_site, operation.site_);
  }
  if (failure && status->failed == 0) {
    status->failed = 1;
    StatusWrite::put(status->failure, failure.text.c_str());
  }
}

void StatusPublisher::nothing_under_way() {
  if (StatusWrite status(entry_); status) status->waiting = status->transfers = 0;
}

void StatusPublisher::enter(std::int64_t now) {
  if (inside_++ == 0 && entry_ != nullptr) entry_->inside.start(now);
}

void StatusPublisher::leave(std::int64_t now) {
  if (--inside_ == 0 && entry_ != nullptr) entry_->inside.stop(now);
}

void StatusPublisher::begin_operation(std::int64_t now) {
  if (under_way_++ == 0 && entry_ != nullptr) entry_->under_way.start(now);
}

void StatusPublisher::end_operation(std::int64_t now) {
  if (--under_way_ == 0 && entry_ != nullptr) entry_->under_way.stop(now);
}

std::string StatusPublisher::describe() const {
  StatusEntry entry;
  if (!StatusRead::copy(entry_, entry)) return "in an unknown state (too many groups to keep track of)";
  const auto kind = [](std::uint8_t value) {
    return std::string(collective::name(static_cast<collective::Kind>(value)));
  };
  const auto at = [](const char* site) { return site[0] == '\0' ? std::string() : std::string(", called at ") + site; };
  const auto since = [](std::int64_t when_ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(now_ns() - when_ns) / 1e9);
    return std::string(text);
  };
  if (entry.failed != 0) return std::string("in a group that failed (") + entry.failure + ")";
  std::string text;
  if (entry.sequence != 0) {
    text = "in " + kind(entry.kind) + " #" + std::to_string(entry.sequence) + " of " + std::to_string(entry.bytes) +
           " bytes for " + since(entry.queued_ns) + at(entry.site);
    if (entry.awaited_count > 0) text += ", waiting for rank " + std::to_string(entry.awaited[0]);
    if (entry.awaited_count > 1) text += " and " + std::to_string(entry.awaited_count - 1) + " more";
  } else if (entry.done_sequence != 0) {
    text = "in no collective for " + since(entry.done_ns) + ", its last having been " + kind(entry.done_kind) + " #" +
           std::to_string(entry.done_sequence) + at(entry.done_site);
  } else {
    text = "in no collective for " + since(entry.joined_ns) + ", since it joined";
  }
  if (entry.without_switch != 0) text += "; its switch is lost";
  if (entry.transfers > 0) {
    const bool is_send = entry.transfer_kind == static_cast<std::uint8_t>(collective::Kind::send);
    text += std::string("; in a ") + (is_send ? "send to " : "receive from ") +
            (entry.transfer_peer < 0 ? "any rank" : "rank " + std::to_string(entry.transfer_peer)) + " with tag " +
            std::to_string(entry.transfer_tag) + " of " + std::to_string(entry.transfer_bytes) + " bytes for " +
            since(entry.transfer_ns) + at(entry.transfer_site);
  }
  return text;
}

}  // namespace netfold::engine
