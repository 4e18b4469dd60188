#include <netfold/transport/fabric/receiver.hpp>
#include <netfold/transport/iovec_cursor.hpp>

#include <utility>

namespace netfold::transport::fabric {
namespace {

// Whether a message of this type may have so many bytes behind its header.
bool is_well_formed(MessageType type, std::size_t bytes) {
  switch (type) {
    case MessageType::segment:
      return bytes > 0;
    case MessageType::written:
      return bytes >= sizeof(WrittenTrailer);
    case MessageType::grant:
      return bytes > 0 && bytes % sizeof(GrantEntry) == 0;
    default:
      return bytes == 0;
  }
}

}  // namespace

void Receiver::post(ReceiveBuffer& buffer) {
  buffer.grant = nullptr;
  if (state_.rails.empty()) return;
  Endpoint& endpoint = *state_.rails[buffer.rail];
  switch (endpoint.receive(buffer.data, state_.segment_bytes, buffer.slab->descriptor(buffer.rail), &buffer)) {
    case Endpoint::Taken::yes:
      return;
    case Endpoint::Taken::later:
      ++state_.counters.refused;
      unposted_.push_back(&buffer);
      return;
    case Endpoint::Taken::never:
      state_.fail_all("buffers cannot be posted: " + endpoint.why());
  }
}

void Receiver::post_refused() {
  const auto refused = std::exchange(unposted_, {});
  for (ReceiveBuffer* buffer : refused) post(*buffer);
}

std::size_t Receiver::receive(Stream& stream, std::span<std::byte>& gpu, std::span<const iovec> pieces) {
  IovecCursor into(pieces);
  std::size_t total = 0, copied = 0;
  for (;;) {
    ReceiveBuffer* segment = stream.next_segment();
    if (segment == nullptr) break;
    const std::uint32_t all_bytes = segment->bytes + (segment->grant != nullptr ? segment->grant->bytes : 0);
    const bool is_in_buffer = stream.offset < segment->bytes;
    const std::byte* source = is_in_buffer ? segment->data + sizeof(MessageHeader) + stream.offset
                                           : segment->grant->into + (stream.offset - segment->bytes);
    const std::size_t left = (is_in_buffer ? segment->bytes : all_bytes) - stream.offset;
    std::span<std::byte> part;
    if (!is_in_buffer && segment->grant->is_gpu) {
      if (gpu.empty() || gpu.data() != source || copied > 0) {
        // The caller must first see what was copied: it may begin a message whose bytes these are. Only the next call may
        // fail the stream.
        if (total == 0) {
          state_.fail(stream, "rank " + std::to_string(stream.peer) + " wrote " + std::to_string(left) +
                                  " bytes into memory of a GPU out of turn");
        }
        break;
      }
      part = gpu.first(std::min(left, gpu.size()));
      gpu = gpu.subspan(part.size());
    } else {
      if (into.at_end()) break;
      part = into.next(left);
      // Written bytes lie in their place already, where the caller reads into the memory that it posted.
      if (part.data() != source) std::memmove(part.data(), source, part.size());
      copied += part.size();
    }
    total += part.size();
    stream.offset += static_cast<std::uint32_t>(part.size());
    if (stream.offset < all_bytes) continue;
    if (segment->grant != nullptr) grants_.handle_read(*std::exchange(segment->grant, nullptr));
    stream.received[stream.read % stream.window()] = nullptr;
    stream.offset = 0;
    ++stream.read;
    post(*segment);
    sender_.send_due_control(stream);
  }
  return total;
}

void Receiver::handle_received(ReceiveBuffer& buffer, std::size_t bytes, std::uint64_t tag) {
  failed_receives_ = 0;
  MessageHeader header;
  const auto found = state_.streams.find(tag);
  if (bytes >= sizeof header) std::memcpy(&header, buffer.data, sizeof header);
  if (found == state_.streams.end() || bytes < sizeof header || header.magic != kMagic ||
      header.bytes != bytes - sizeof header || !is_well_formed(header.type, header.bytes)) {
    ++state_.counters.rejected;
    return post(buffer);
  }
  Stream& stream = *found->second;
  if (!std::exchange(stream.is_heard, true)) stream.doorbell->ring();
  sender_.handle_confirmation(stream, header.read);
  switch (header.type) {
    case MessageType::segment:
    case MessageType::written:
      return handle_segment(stream, buffer, header);
    case MessageType::credit:
    case MessageType::probe:
      if (state_.has_several_rails()) sender_.handle_probe_reply(stream, header.sequence);
      break;
    case MessageType::grant:
      grants_.handle_grants(stream, {buffer.data + sizeof header, header.bytes});
      break;
    case MessageType::cancel:
      grants_.handle_cancel(stream);
      break;
    case MessageType::cancelled:
      stream.peer_writes = header.sequence;
  }
  stream.owes_probe_reply |= header.type == MessageType::probe;
  post(buffer);
  sender_.send_due_control(stream);
}

void Receiver::handle_segment(Stream& stream, ReceiveBuffer& buffer, const MessageHeader& header) {
  ++state_.counters.segments_received;
  const std::uint32_t ahead = header.sequence - stream.read;
  ReceiveBuffer*& place = stream.received[header.sequence % stream.window()];
  if (ahead >= stream.window() || place != nullptr) {
    ++state_.counters.repeated;
    // A peer that repeats a segment which was read has not received the report. Make a credit due.
    stream.reported_read = stream.read - stream.window();
    post(buffer);
    return sender_.send_due_control(stream);
  }
  if (ahead > 0 && stream.next_segment() == nullptr) ++state_.counters.out_of_order;
  buffer.bytes = header.bytes;
  if (header.type == MessageType::written && !grants_.attach_grant(stream, buffer)) {
    ++state_.counters.rejected;
    // Without the segment the stream would stop for ever.
    state_.fail(stream, "rank " + std::to_string(stream.peer) +
                            " broke the stream's protocol: it named memory that it was not granted, or twice");
    return post(buffer);
  }
  if (buffer.grant != nullptr && state_.limits.front().orders_writes) grants_.handle_landed(buffer.grant->number);
  place = &buffer;
  if (ahead > 0) return;
  stream.list_readable();
  stream.doorbell->ring();
}

void Receiver::handle_receive_error(ReceiveBuffer& buffer, const std::string& reason) {
  ++state_.counters.rejected;
  ++failed_receives_;
  if (failed_receives_ == kMaxFailedReceives) state_.fail_all("no message can be received: " + reason);
  if (failed_receives_ < kMaxFailedReceives) post(buffer);
}

}  // namespace netfold::transport::fabric
