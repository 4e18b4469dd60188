#include <netfold/transport/fabric/sender.hpp>
#include <netfold/transport/iovec_cursor.hpp>

namespace netfold::transport::fabric {

std::size_t Sender::send(Stream& stream, std::span<const iovec> pieces) {
  IovecCursor from(pieces);
  std::size_t total = 0;
  while (!from.at_end() && stream.may_send()) {
    SendBuffer& buffer = stream.segment_buffer(stream.sent);
    const std::size_t bytes =
        from.copy_to(buffer.data + sizeof(MessageHeader), state_.segment_bytes - sizeof(MessageHeader));
    total += bytes;
    send_segment(stream, buffer, sizeof(MessageHeader) + bytes, MessageType::segment);
  }
  stream.awaits_offer = false;
  stream.bytes_taken += total;
  return total;
}

void Sender::send_segment(Stream& stream, SendBuffer& buffer, std::size_t bytes, MessageType type) {
  const MessageHeader header{.sequence = stream.sent,
                             .read = stream.read,
                             .bytes = static_cast<std::uint32_t>(bytes - sizeof header),
                             .type = type};
  std::memcpy(buffer.data, &header, sizeof header);
  buffer.bytes = static_cast<std::uint32_t>(bytes);
  stream.reported_read = stream.read;
  ++stream.sent;
  ++state_.counters.segments_sent;
  buffer.rail = stream.take_rail();
  buffer.state = SendBuffer::State::waiting;
  stream.waiting.push_back(&buffer);
  send_waiting(stream);
}

Endpoint::Taken Sender::offer(SendBuffer& buffer) {
  Stream& stream = *buffer.stream;
  Endpoint& endpoint = *state_.rails[buffer.rail];
  const auto peer = stream.peers[buffer.rail];
  const bool injects = buffer.bytes <= endpoint.limits().inject_bytes;
  const auto taken = injects ? endpoint.inject(peer, buffer.data, buffer.bytes, stream.send_tag)
                             : endpoint.send(peer, buffer.data, buffer.bytes, buffer.slab->descriptor(buffer.rail),
                                             stream.send_tag, &buffer);
  switch (taken) {
    case Endpoint::Taken::yes:
      if (state_.has_several_rails()) buffer.sent_ns = now_ns();
      buffer.state = injects ? SendBuffer::State::free : SendBuffer::State::under_way;
      stream.under_way += injects ? 0 : 1;
      break;
    case Endpoint::Taken::later:
      ++state_.counters.refused;
      buffer.state = SendBuffer::State::waiting;
      break;
    case Endpoint::Taken::never:
      buffer.state = SendBuffer::State::free;
      fail_rail(stream, buffer.rail, endpoint.why());
  }
  return taken;
}

// Offers the waiting segments, oldest first, behind a waiting control message.
void Sender::send_waiting(Stream& stream) {
  bool is_refused = stream.control_buffer().state == SendBuffer::State::waiting;
  while (!is_refused && !stream.waiting.empty()) {
    SendBuffer& buffer = *stream.waiting.front();
    stream.waiting.pop_front();
    is_refused = offer(buffer) == Endpoint::Taken::later;
    if (is_refused) stream.waiting.push_front(&buffer);
  }
  if (is_refused) state_.retry_later(stream);
}

void Sender::retry(Stream& stream) {
  // Make the control message anew: more may have been read since.
  SendBuffer& control = stream.control_buffer();
  if (control.state == SendBuffer::State::waiting) control.state = SendBuffer::State::free;
  send_due_control(stream);
  send_waiting(stream);
}

void Sender::send_due_control(Stream& stream) {
  if (stream.peers.empty()) return;  // the peer connected first
  while (stream.failure.empty() && stream.control_buffer().state != SendBuffer::State::under_way) {
    const auto type = stream.due_control();
    if (!type) return;
    const auto taken = send_control(stream, *type);
    if (taken == Endpoint::Taken::later) return send_waiting(stream);
    if (taken == Endpoint::Taken::never) continue;  // over another rail, if one is left
    stream.reported_read = stream.read;
    if (type == MessageType::probe) stream.owes_hello = false;
    if (type == MessageType::cancel) stream.owes_cancel = false;
    if (type == MessageType::cancelled) stream.owes_cancelled = false;
    if (type != MessageType::credit) continue;
    stream.owes_probe_reply = false;
    ++state_.counters.credits_sent;
  }
}

Endpoint::Taken Sender::send_control(Stream& stream, MessageType type) {
  SendBuffer& buffer = stream.control_buffer();
  const MessageHeader header{.sequence = type == MessageType::cancelled ? stream.writes_begun : stream.first_missing(),
                             .read = stream.read,
                             .type = type};
  std::memcpy(buffer.data, &header, sizeof header);
  buffer.bytes = sizeof header;
  buffer.rail = stream.take_rail();
  return offer(buffer);
}

void Sender::probe_for_losses() {
  const std::int64_t now = now_ns();
  for (auto& [tag, each] : state_.streams) {
    Stream& stream = *each;
    if (!stream.failure.empty() || stream.confirmed == stream.sent) continue;
    const bool is_recent = now - stream.segment_buffer(stream.confirmed).sent_ns < kProbeIntervalNs;
    SendBuffer& control = stream.control_buffer();
    if (is_recent || now - stream.probed_ns < kProbeIntervalNs || control.state != SendBuffer::State::free) continue;
    stream.probed_ns = now;
    // A refused probe is dropped: the next one follows in kProbeIntervalNs.
    if (send_control(stream, MessageType::probe) == Endpoint::Taken::later) control.state = SendBuffer::State::free;
  }
}

void Sender::handle_confirmation(Stream& stream, std::uint32_t read) {
  const std::uint32_t newly_read = read - stream.confirmed;
  if (newly_read == 0 || newly_read > stream.sent - stream.confirmed) return;
  stream.confirmed = read;
  // A segment that was read has arrived.
  if (stream.arrived - stream.confirmed > stream.sent - stream.confirmed) stream.arrived = read;
  stream.doorbell->ring();
}

void Sender::handle_probe_reply(Stream& stream, std::uint32_t first_missing) {
  if (first_missing - stream.confirmed > stream.sent - stream.confirmed) return;  // an old reply
  stream.arrived = first_missing;
  if (first_missing == stream.sent || stream.rails_left() < 2) return;
  const SendBuffer& missing = stream.segment_buffer(first_missing);
  const bool is_overdue = missing.state == SendBuffer::State::free && now_ns() - missing.sent_ns > kLostNs;
  if (is_overdue) fail_rail(stream, missing.rail, "no message that went over it arrived");
}

void Sender::handle_sent(SendBuffer& buffer) {
  Stream& stream = *buffer.stream;
  --stream.under_way;
  buffer.state = SendBuffer::State::free;
  if (&buffer == &stream.control_buffer()) return send_due_control(stream);
  if (&buffer == &stream.grant_buffer()) return;
  if (stream.rail_failed[buffer.rail] && stream.failure.empty()) send_again(stream, buffer.rail);
  stream.doorbell->ring();
}

void Sender::handle_send_error(SendBuffer& buffer, const std::string& reason) {
  buffer.state = SendBuffer::State::free;
  --buffer.stream->under_way;
  if (!buffer.stream->is_leaving) fail_rail(*buffer.stream, buffer.rail, reason);
}

void Sender::fail_rail(Stream& stream, std::size_t rail, const std::string& reason) {
  if (!stream.rail_failed[rail]) ++state_.counters.rails_lost;
  stream.rail_failed[rail] = true;
  if (stream.rails_left() == 0) return state_.fail(stream, "sending failed: " + reason);
  send_again(stream, rail);
}

// Moves the unconfirmed segments of a failed rail to the first working one.
void Sender::send_again(Stream& stream, std::size_t rail) {
  const auto working = std::find(stream.rail_failed.begin(), stream.rail_failed.end(), false);
  for (std::uint32_t number = stream.sent; number != stream.confirmed; --number) {
    SendBuffer& buffer = stream.segment_buffer(number - 1);
    if (buffer.rail != rail || buffer.state == SendBuffer::State::under_way) continue;
    buffer.rail = static_cast<std::size_t>(working - stream.rail_failed.begin());
    if (buffer.state == SendBuffer::State::waiting) std::erase(stream.waiting, &buffer);
    buffer.state = SendBuffer::State::waiting;
    stream.waiting.push_front(&buffer);
  }
  if (!stream.waiting.empty()) state_.retry_later(stream);
}

}  // namespace netfold::transport::fabric
