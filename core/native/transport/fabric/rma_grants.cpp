#include <sys/random.h>
#include <netfold/transport/fabric/rma_grants.hpp>
#include <netfold/transport/iovec_cursor.hpp>

#include <utility>

namespace netfold::transport::fabric {

std::string RmaGrants::obstacle(std::size_t rma_min_bytes) const {
  const Endpoint::Limits& limits = state_.limits.front();
  if (rma_min_bytes == 0) return "it is turned off (NETFOLD_RMA_MIN_BYTES)";
  if (limits.write_bytes == 0) return state_.provider() + " cannot write to a peer's memory with immediate data";
  if (limits.peers_write) return state_.provider() + " cannot take back memory that a peer may write to";
  if (state_.has_several_rails()) return "there are several rails";
  const std::size_t least =
      sizeof(MessageHeader) + std::max(kMaxBeforeBytes + sizeof(WrittenTrailer), sizeof(GrantEntry));
  return state_.segment_bytes < least ? state_.provider() + " has messages that are too short" : "";
}

bool RmaGrants::uses_rma(std::size_t rma_min_bytes, std::size_t bytes) const {
  return rma_min_bytes > 0 && bytes >= rma_min_bytes && bytes <= state_.limits.front().write_bytes &&
         bytes <= UINT32_MAX;
}

std::size_t RmaGrants::message_bytes() const {
  const std::size_t most = sizeof(MessageHeader) + kGrantsAMessage * sizeof(GrantEntry);
  return std::min(most, state_.segment_bytes) / sizeof(MessageHeader) * sizeof(MessageHeader);
}

std::string RmaGrants::gpu_obstacle() const {
  const std::string why = obstacle(1);
  return why.empty() ? state_.limits.front().no_gpus : why;
}

std::size_t RmaGrants::gpu_part_bytes() const {
  return obstacle(1).empty() ? std::min<std::size_t>(state_.limits.front().write_bytes, UINT32_MAX) : 0;
}

// Null where the memory cannot be registered; the stream has failed then.
RegistrationCache::Entry* RmaGrants::acquire(Stream& stream, std::byte* data, std::size_t bytes, Pipe::GpuMemory* gpu) {
  if (gpu != nullptr) {
    auto* entry = static_cast<RegistrationCache::GpuEntry*>(gpu);
    const bool is_inside = data >= entry->data && data + bytes <= entry->data + entry->bytes;
    if (!is_inside || entry->registration == nullptr) {
      state_.fail(stream, std::to_string(bytes) + " bytes are not in the " + std::to_string(entry->bytes) +
                              " bytes of a GPU's memory that were registered" +
                              (is_inside ? ", since the endpoint was closed" : ""));
      return nullptr;
    }
    ++entry->users;
    return entry;
  }
  try {
    return cache_.acquire(data, bytes);
  } catch (const Error& error) {
    state_.fail(stream, error.what());
    return nullptr;
  }
}

// --- Owner -----------------------------------------------------------------------------------------------------------

bool RmaGrants::post_receive(Stream& stream, std::uint64_t name, std::byte* into, std::size_t bytes,
                             Pipe::GpuMemory* gpu) {
  if (!stream.failure.empty() || stream.is_cancelling || stream.grants == kMaxGrants) return false;
  Grant grant{.stream = &stream, .into = into, .bytes = static_cast<std::uint32_t>(bytes)};
  grant.is_gpu = gpu != nullptr;
  grant.entry = acquire(stream, into, bytes, gpu);
  if (grant.entry == nullptr) return false;
  do {
    grant.number = random_number();
  } while (grants_.contains(grant.number));
  const Registration& registration = *grant.entry->registration;
  stream.unsent_grants.push_back({name, {registration.address(into), registration.key()}, grant.bytes, grant.number});
  grants_.emplace(grant.number, grant);
  ++stream.grants;
  ++stream.open_grants;
  return true;
}

std::uint32_t RmaGrants::random_number() {
  if (random_numbers_.empty()) {
    random_numbers_.resize(64);
    const std::size_t bytes = random_numbers_.size() * sizeof random_numbers_.front();
    if (getrandom(random_numbers_.data(), bytes, 0) != static_cast<ssize_t>(bytes)) throw_errno("getrandom");
  }
  const std::uint32_t number = random_numbers_.back();
  random_numbers_.pop_back();
  return number;
}

void RmaGrants::send_grants(Stream& stream) {
  if (stream.peers.empty()) return;  // not connected yet
  SendBuffer& buffer = stream.grant_buffer();
  const std::size_t most = (message_bytes() - sizeof(MessageHeader)) / sizeof(GrantEntry);
  while (!stream.unsent_grants.empty() && buffer.state == SendBuffer::State::free && stream.failure.empty()) {
    const std::size_t count = std::min(stream.unsent_grants.size(), most);
    const MessageHeader header{.sequence = stream.first_missing(),
                               .read = stream.read,
                               .bytes = static_cast<std::uint32_t>(count * sizeof(GrantEntry)),
                               .type = MessageType::grant};
    std::memcpy(buffer.data, &header, sizeof header);
    std::memcpy(buffer.data + sizeof header, stream.unsent_grants.data(), header.bytes);
    buffer.bytes = static_cast<std::uint32_t>(sizeof header) + header.bytes;
    buffer.rail = stream.take_rail();
    const auto taken = sender_.offer(buffer);
    if (taken == Endpoint::Taken::never) return;
    if (taken == Endpoint::Taken::later) {
      buffer.state = SendBuffer::State::free;
      return state_.retry_later(stream);
    }
    stream.reported_read = stream.read;
    stream.unsent_grants.erase(stream.unsent_grants.begin(),
                               stream.unsent_grants.begin() + static_cast<std::ptrdiff_t>(count));
    state_.counters.grants += count;
  }
}

bool RmaGrants::attach_grant(Stream& stream, ReceiveBuffer& buffer) {
  WrittenTrailer trailer;
  buffer.bytes -= static_cast<std::uint32_t>(sizeof trailer);
  std::memcpy(&trailer, buffer.data + sizeof(MessageHeader) + buffer.bytes, sizeof trailer);
  const auto found = grants_.find(trailer.number);
  if (found == grants_.end() || found->second.stream != &stream || found->second.bytes != trailer.bytes) return false;
  if (std::exchange(found->second.is_named, true)) return false;
  buffer.grant = &found->second;
  return true;
}

void RmaGrants::handle_landed(std::uint32_t number) {
  const auto found = grants_.find(number);
  if (found == grants_.end() || found->second.state != Grant::State::open) {
    ++state_.counters.rejected;
    return;
  }
  Grant& grant = found->second;
  grant.state = Grant::State::landed;
  cache_.release(std::exchange(grant.entry, nullptr));
  Stream& stream = *grant.stream;
  --stream.open_grants;
  ++stream.landed;
  stream.list_readable();
  stream.doorbell->ring();
}

void RmaGrants::handle_read(const Grant& grant) {
  --grant.stream->grants;
  grants_.erase(grant.number);
}

// --- Writer ----------------------------------------------------------------------------------------------------------

void RmaGrants::handle_grants(Stream& stream, std::span<const std::byte> entries) {
  for (; !entries.empty(); entries = entries.subspan(sizeof(GrantEntry))) {
    if (stream.peer_cancelled) return;  // a grant that was revoked may arrive late
    GrantEntry entry;
    std::memcpy(&entry, entries.data(), sizeof entry);
    const bool is_full = stream.offers.size() == kMaxGrants;
    if (is_full || !stream.offers.emplace(entry.name, entry).second) ++state_.counters.rejected;
  }
  stream.doorbell->ring();
}

std::size_t RmaGrants::put(Stream& stream, std::span<const iovec> pieces, std::uint64_t name, Pipe::GpuMemory* gpu) {
  const auto offer = stream.offers.find(name);
  const iovec& part = pieces.back();
  // With another length, the two ranks' calls differ; the reader of the message reports that.
  stream.awaits_offer = offer == stream.offers.end() || offer->second.bytes != part.iov_len;
  if (stream.awaits_offer || !stream.may_send()) return 0;
  auto* data = static_cast<std::byte*>(part.iov_base);
  RegistrationCache::Entry* entry = nullptr;
  if (state_.limits.front().needs_registration || gpu != nullptr) {
    entry = acquire(stream, data, part.iov_len, gpu);
    if (entry == nullptr) return 0;
  }
  RmaWrite& write = stream.writes.emplace_back();
  write.stream = &stream;
  write.entry = entry;
  write.first = stream.bytes_taken;
  const GrantEntry grant = offer->second;
  Endpoint& endpoint = *state_.rails.front();
  const auto taken = endpoint.write(stream.peers.front(), data, part.iov_len,
                                    entry != nullptr ? entry->registration->descriptor() : nullptr, grant.buffer,
                                    grant.number, &write);
  stream.write_refused = taken == Endpoint::Taken::later;
  if (taken != Endpoint::Taken::yes) {
    if (entry != nullptr) cache_.release(entry);
    stream.writes.pop_back();
    state_.counters.refused += stream.write_refused ? 1 : 0;
    if (!stream.write_refused) state_.fail(stream, "a write to the peer's memory was refused: " + endpoint.why());
    return 0;
  }
  stream.offers.erase(offer);
  ++stream.writes_begun;
  ++state_.counters.writes;
  state_.counters.bytes_written += grant.bytes;
  SendBuffer& buffer = stream.segment_buffer(stream.sent);
  std::byte* before = buffer.data + sizeof(MessageHeader);
  const std::size_t before_bytes = IovecCursor(pieces.first(pieces.size() - 1)).copy_to(before, kMaxBeforeBytes);
  const WrittenTrailer trailer{grant.number, grant.bytes};
  std::memcpy(before + before_bytes, &trailer, sizeof trailer);
  stream.bytes_taken += before_bytes + grant.bytes;
  sender_.send_segment(stream, buffer, sizeof(MessageHeader) + before_bytes + sizeof trailer, MessageType::written);
  return before_bytes + grant.bytes;
}

void RmaGrants::handle_write_completed(RmaWrite& write) {
  Stream& stream = *write.stream;
  write.is_complete = true;
  if (write.entry != nullptr) cache_.release(std::exchange(write.entry, nullptr));
  while (!stream.writes.empty() && stream.writes.front().is_complete) stream.writes.pop_front();
  stream.doorbell->ring();
}

void RmaGrants::handle_cancel(Stream& stream) {
  stream.peer_cancelled = stream.owes_cancelled = true;
  stream.offers.clear();
}

// --- Cancelling ------------------------------------------------------------------------------------------------------

bool RmaGrants::cancel(Stream& stream) {
  stream.reported_in_flight = stream.bytes_in_flight();
  // Before this end was connected it told no grant, so the peer began no write.
  if (stream.peers.empty()) stream.peer_writes = 0;
  if (stream.open_grants > 0 && !stream.is_cancelling) {
    stream.is_cancelling = stream.owes_cancel = true;
    // The peer never learns of these grants, but grants_ holds them and revokes them below.
    stream.unsent_grants.clear();
    sender_.send_due_control(stream);
  }
  if (stream.open_grants > 0) {
    if (stream.peer_writes != stream.landed) return false;
    for (auto& [number, grant] : grants_) {
      if (grant.stream != &stream || grant.state != Grant::State::open) continue;
      grant.state = Grant::State::revoked;
      cache_.release(std::exchange(grant.entry, nullptr));
      ++state_.counters.grants_cancelled;
    }
    stream.open_grants = 0;
  }
  return stream.writes.empty();
}

void RmaGrants::forget_grants_of(const Stream& stream) {
  std::erase_if(grants_, [&](const auto& each) { return each.second.stream == &stream; });
}

void RmaGrants::handle_endpoint_closed() {
  for (auto& [number, grant] : grants_) {
    if (grant.state == Grant::State::open) grant.state = Grant::State::revoked;
    grant.entry = nullptr;
  }
}

}  // namespace netfold::transport::fabric
