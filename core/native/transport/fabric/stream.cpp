#include <netfold/transport/fabric/stream.hpp>

namespace netfold::transport::fabric {
namespace {

std::vector<Endpoint::Limits> limits_of(const std::vector<std::unique_ptr<Endpoint>>& rails) {
  std::vector<Endpoint::Limits> limits;
  for (const auto& rail : rails) limits.push_back(rail->limits());
  return limits;
}

}  // namespace

void Doorbell::ring() {
  if (!asleep) return;
  asleep = false;
  is_rung = true;
  signal(event);
}

void Doorbell::note_awake() {
  asleep = false;
  if (std::exchange(is_rung, false)) clear(event);
}

MuxState::MuxState(std::vector<std::unique_ptr<Endpoint>> endpoints)
    : rails(std::move(endpoints)), limits(limits_of(rails)), segment_bytes(kMaxSegmentBytes) {
  for (const Endpoint::Limits& rail : limits) {
    segment_bytes = std::min(segment_bytes, rail.message_bytes);
    if (rail.tag_bits < kLeastTagBits || rail.message_bytes < 2 * sizeof(MessageHeader)) {
      throw Error(provider() + " has tags of " + std::to_string(rail.tag_bits) + " bits and messages of " +
                  std::to_string(rail.message_bytes) + " bytes; netfold needs " + std::to_string(kLeastTagBits) +
                  " bits and " + std::to_string(2 * sizeof(MessageHeader)) + " bytes");
    }
  }
  segment_bytes = segment_bytes / sizeof(MessageHeader) * sizeof(MessageHeader);
}

void MuxState::retry_later(Stream& stream) {
  if (stream.is_pending) return;
  stream.is_pending = true;
  pending.push_back(&stream);
}

void MuxState::fail(Stream& stream, const std::string& reason) {
  if (!stream.failure.empty()) return;
  stream.failure = reason.starts_with(provider()) ? reason : provider() + ": " + reason;
  for (SendBuffer* buffer : stream.waiting) buffer->state = SendBuffer::State::free;
  stream.waiting.clear();
  SendBuffer& control = stream.control_buffer();
  if (control.state == SendBuffer::State::waiting) control.state = SendBuffer::State::free;
  stream.list_readable();
  stream.doorbell->ring();
}

}  // namespace netfold::transport::fabric
