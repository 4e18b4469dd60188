#include <netfold/protocol/canonical.hpp>
#include <netfold/protocol/parent_sender.hpp>

#include <algorithm>

namespace netfold::protocol {

void ParentSender::offer(std::uint32_t slot) {
  Entry& entry = entries_[slot];
  if (entry.state == State::due) return;
  if (entry.state == State::flight) {
    make_due(slot);
    return;
  }
  entry.state = State::due;
  due_.push_back(entries_, slot);
}

std::optional<ParentSender::Send> ParentSender::poll_send() {
  const std::uint32_t slot = due_.head;
  if (slot == kNone) return std::nullopt;
  Entry& entry = entries_[slot];
  due_.unlink(entries_, slot);
  entry.state = State::flight;
  entry.again = entry.sent;
  entry.sent = true;
  entry.send_number = ++packet_number_;
  flight_.push_back(entries_, slot);
  ++packets_sent_;
  sent_again_ += entry.again ? 1 : 0;
  return Send{slot, packet_number_};
}

void ParentSender::not_sent(std::uint32_t slot) {
  Entry& entry = entries_[slot];
  --packets_sent_;
  sent_again_ -= entry.again ? 1 : 0;
  // The packet never left: its next sending is no retransmission, unless this one was.
  entry.sent = entry.again;
  make_due(slot);
}

void ParentSender::handle_result(std::uint32_t slot, std::uint64_t number) {
  Entry& entry = entries_[slot];
  // The result of a sum that was sent twice does not show which of the two was answered.
  if (entry.state == State::flight && !entry.again) {
    highest_received_send_ = std::max(highest_received_send_, entry.send_number);
  }
  (entry.state == State::flight ? flight_ : due_).unlink(entries_, slot);
  entry = Entry{};
  const auto gap = result_gaps_.observe(number);
  std::uint32_t at = flight_.head;
  for (std::uint32_t left = gap.count; left > 0 && at != kNone; --left) {
    if (entries_[at].send_number + kReorderThreshold > highest_received_send_) break;
    const std::uint32_t following = entries_[at].next;
    make_due(at);
    at = following;
  }
}

std::uint32_t ParentSender::handle_nack(std::uint64_t first, std::uint64_t count) {
  std::uint32_t again = 0;
  for (std::uint32_t at = flight_.head; at != kNone;) {
    const std::uint64_t send_number = entries_[at].send_number;
    const std::uint32_t following = entries_[at].next;
    if (send_number >= first) {
      if (send_number - first >= count) break;
      make_due(at);
      ++again;
    }
    at = following;
  }
  return again;
}

void ParentSender::make_due(std::uint32_t slot) {
  flight_.unlink(entries_, slot);
  entries_[slot].state = State::due;
  due_.push_back(entries_, slot);
}

void ParentSender::append_canonical(std::vector<std::byte>& out) const {
  append_values(out, due_.head, flight_.head);
  for (const Entry& entry : entries_) {
    append_values(out, entry.state, entry.sent, entry.again, entry.next, entry.send_number);
  }
  append_values(out, packet_number_, highest_received_send_, packets_sent_, sent_again_);
}

}  // namespace netfold::protocol
