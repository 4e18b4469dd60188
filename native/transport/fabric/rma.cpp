#include "stream_mux_parts.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <utility>

namespace netfold::transport::fabric {

class StreamMux::MuxLease final : public Pipe::RegistrationLease {
 public:
  MuxLease(std::shared_ptr<StreamMux> mux, RegistrationCache::Lease* lease) : mux_(std::move(mux)), lease_(lease) {}
  ~MuxLease() override {
    if (mux_->pid_ != getpid()) return;  // a child of fork: the registration is its parent's
    std::lock_guard lock(mux_->mutex_);
    mux_->cache_.end_lease(lease_);
  }
  MuxLease(const MuxLease&) = delete;
  MuxLease& operator=(const MuxLease&) = delete;
  std::uint32_t hits() const override {
    std::lock_guard lock(mux_->mutex_);
    return lease_->hits;
  }
  std::uint32_t misses() const override {
    std::lock_guard lock(mux_->mutex_);
    return lease_->misses;
  }

 private:
  std::shared_ptr<StreamMux> mux_;
  RegistrationCache::Lease* lease_;
};

std::unique_ptr<Pipe::RegistrationLease> StreamMux::lease(std::byte* data, std::size_t bytes,
                                                          RegistrationCache::Lifetime lifetime) {
  std::lock_guard lock(mutex_);
  return std::make_unique<MuxLease>(shared_from_this(), cache_.add_lease(data, bytes, lifetime));
}

// What is not used and too much is unmapped, the longest unused first.
class StreamMux::MuxScratch final : public Pipe::Scratch {
 public:
  MuxScratch(std::shared_ptr<StreamMux> mux, std::unique_ptr<Block> block)
      : mux_(std::move(mux)), block_(std::move(block)) {}
  ~MuxScratch() override {
    std::lock_guard lock(mux_->mutex_);
    auto& blocks = mux_->blocks_;
    blocks.push_back(std::move(block_));
    std::size_t bytes = 0;
    for (const auto& block : blocks) bytes += block->bytes;
    for (; bytes > kScratchBytes; blocks.erase(blocks.begin())) {
      bytes -= blocks.front()->bytes;
      mux_->cache_.end_lease(blocks.front()->lease);
    }
  }
  MuxScratch(const MuxScratch&) = delete;
  MuxScratch& operator=(const MuxScratch&) = delete;
  std::byte* data() const override { return block_->data; }

 private:
  std::shared_ptr<StreamMux> mux_;
  std::unique_ptr<Block> block_;
};

std::unique_ptr<Pipe::Scratch> StreamMux::scratch(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  bytes = std::bit_ceil(bytes);
  const auto fits = [&](const auto& block) { return block->bytes == bytes; };
  const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), fits);
  std::unique_ptr<Block> block;
  if (found != blocks_.rend()) {
    block = std::move(*found);
    blocks_.erase(std::next(found).base());
  } else {
    block = std::make_unique<Block>(bytes);
    block->lease = cache_.add_lease(block->data, bytes, RegistrationCache::Lifetime::internal);
  }
  return std::make_unique<MuxScratch>(shared_from_this(), std::move(block));
}

void StreamMux::set(const Settings& settings) {
  std::lock_guard lock(mutex_);
  settings_ = settings;
  cache_.limit(settings.registrations);
}

std::string StreamMux::why_not_rma() const {
  std::lock_guard lock(mutex_);
  return obstacle();
}

std::string StreamMux::obstacle() const {
  if (settings_.rma_min_bytes == 0) return "it is turned off (NETFOLD_RMA_MIN_BYTES)";
  if (limits().write_bytes == 0)
    return "provider " + limits().provider + " cannot write to a peer's memory with a word";
  if (limits().peers_write)
    return "provider " + limits().provider + " cannot take back memory that a peer may write to";
  if (rails() > 1) return "there are several rails";
  const std::size_t least = sizeof(Header) + std::max(kMaxBeforeBytes + sizeof(WrittenTrailer), sizeof(GrantEntry));
  if (segment_bytes_ < least) return "provider " + limits().provider + " has messages that are too short";
  return "";
}

bool StreamMux::uses_rma(const Stream* stream, std::size_t bytes) const {
  return stream->rma_min_bytes > 0 && bytes >= stream->rma_min_bytes && bytes <= limits().write_bytes &&
         bytes <= UINT32_MAX;
}

// --- who receives ----------------------------------------------------------------------------------------------------

bool StreamMux::post_receive(Stream* from, std::uint64_t name, std::byte* into, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  Stream& stream = *from;
  if (!stream.why.empty() || stream.is_cancelling || stream.grants == kMaxGrants) return false;
  Grant grant{.stream = &stream, .into = into, .bytes = static_cast<std::uint32_t>(bytes)};
  try {
    grant.entry = cache_.acquire(into, bytes);
  } catch (const Error& error) {
    fail(stream, error.what());
    return false;
  }
  do {
    grant.number = random_number();
  } while (grants_.contains(grant.number));
  const Registration& registration = *grant.entry->registration;
  stream.to_tell.push_back({name, {registration.address(into), registration.key()}, grant.bytes, grant.number});
  grants_.emplace(grant.number, grant);
  ++stream.grants;
  ++stream.open_grants;
  return true;
}

std::uint32_t StreamMux::random_number() {
  if (random_.empty()) {
    random_.resize(64);
    const auto bytes = random_.size() * sizeof random_.front();
    if (getrandom(random_.data(), bytes, 0) != static_cast<ssize_t>(bytes)) throw_errno("getrandom");
  }
  const std::uint32_t number = random_.back();
  random_.pop_back();
  return number;
}

std::size_t StreamMux::grant_message_bytes() const {
  const std::size_t most = sizeof(Header) + kGrantsAMessage * sizeof(GrantEntry);
  return std::min(most, segment_bytes_) / sizeof(Header) * sizeof(Header);
}

void StreamMux::send_grants(Stream& stream) {
  if (stream.peers.empty()) return;  // nobody to tell yet
  Sending& sending = stream.granting();
  const std::size_t most = (grant_message_bytes() - sizeof(Header)) / sizeof(GrantEntry);
  while (!stream.to_tell.empty() && sending.state == Sending::State::free && stream.why.empty()) {
    const std::size_t count = std::min(stream.to_tell.size(), most);
    const Header header{.sequence = stream.first_missing(),
                        .read = stream.read,
                        .bytes = static_cast<std::uint32_t>(count * sizeof(GrantEntry)),
                        .type = MessageType::grant};
    std::memcpy(sending.data, &header, sizeof header);
    std::memcpy(sending.data + sizeof header, stream.to_tell.data(), header.bytes);
    sending.bytes = static_cast<std::uint32_t>(sizeof header + count * sizeof(GrantEntry));
    sending.rail = stream.take_rail();
    const auto taken = hand_over(sending);
    if (taken == Endpoint::Taken::never) return;
    if (taken == Endpoint::Taken::later) {
      sending.state = Sending::State::free;
      return push_later(stream);
    }
    stream.told = stream.read;
    stream.to_tell.erase(stream.to_tell.begin(), stream.to_tell.begin() + static_cast<std::ptrdiff_t>(count));
    counters_.grants += count;
  }
}

// The last word of the segment says where more of its bytes are. False: nothing was granted there.
bool StreamMux::place_written(Stream& stream, Receiving& receiving) {
  WrittenTrailer word;
  receiving.bytes -= static_cast<std::uint32_t>(sizeof word);
  std::memcpy(&word, receiving.data + sizeof(Header) + receiving.bytes, sizeof word);
  const auto found = grants_.find(word.number);
  if (found == grants_.end()) return false;
  Grant& grant = found->second;
  if (grant.stream != &stream || grant.bytes != word.bytes) return false;
  receiving.grant = &grant;
  return true;
}

void StreamMux::landed(std::uint32_t number) {
  const auto found = grants_.find(number);
  if (found == grants_.end() || found->second.state != Grant::State::open) {
    ++counters_.rejected;
    return;
  }
  Grant& grant = found->second;
  grant.state = Grant::State::landed;
  cache_.release(std::exchange(grant.entry, nullptr));
  Stream& stream = *grant.stream;
  --stream.open_grants;
  ++stream.landed;
  ring_doorbell(stream);
}

// --- who sends -------------------------------------------------------------------------------------------------------

void StreamMux::granted(Stream& stream, const std::byte* words, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(GrantEntry)) {
    GrantEntry word;
    std::memcpy(&word, words + at, sizeof word);
    // One that was revoked may come late, and more than may be is nobody's word.
    if (stream.is_cancelled) return;
    if (stream.offers.size() == kMaxGrants || !stream.offers.emplace(word.name, word).second) ++counters_.rejected;
  }
  ring_doorbell(stream);
}

bool StreamMux::is_offered(Stream* to, std::uint64_t name) {
  std::lock_guard lock(mutex_);
  if (!to->offers.contains(name)) progress_if_due();
  to->wants_offer = !to->offers.contains(name);
  return !to->wants_offer;
}

std::size_t StreamMux::put(Stream* to, std::span<const iovec> pieces, std::uint64_t name) {
  std::lock_guard lock(mutex_);
  Stream& stream = *to;
  stream.doorbell->asleep = false;
  if (!stream.may_send() || !stream.offers.contains(name)) progress_if_due();
  const auto offer = stream.offers.find(name);
  const iovec& piece = pieces.back();
  // Of another length: the calls differ, which who reads the message will say.
  stream.wants_offer = offer == stream.offers.end() || offer->second.bytes != piece.iov_len;
  if (stream.wants_offer || !stream.may_send()) return 0;
  Writing& writing = stream.writings.emplace_back();
  writing.stream = &stream;
  writing.first = stream.taken;
  auto* data = static_cast<std::byte*>(piece.iov_base);
  void* descriptor = nullptr;
  if (limits().needs_registration) {
    try {
      writing.entry = cache_.acquire(data, piece.iov_len);
    } catch (const Error& error) {
      stream.writings.pop_back();
      fail(stream, error.what());
      return 0;
    }
    descriptor = writing.entry->registration->descriptor();
  }
  const GrantEntry word = offer->second;
  Endpoint& endpoint = *rails_.front();
  const auto taken =
      endpoint.write(stream.peers.front(), data, piece.iov_len, descriptor, word.place, word.number, &writing);
  stream.is_refused = taken == Endpoint::Taken::later;
  if (taken != Endpoint::Taken::yes) {
    if (writing.entry != nullptr) cache_.release(writing.entry);
    stream.writings.pop_back();
    counters_.refused += stream.is_refused ? 1 : 0;
    if (taken == Endpoint::Taken::never) fail(stream, "a write to the peer's memory is not taken: " + endpoint.why());
    return 0;
  }
  stream.offers.erase(offer);
  ++stream.writes;
  ++counters_.writes;
  counters_.bytes_written += word.bytes;
  Sending& sending = stream.segment(stream.sent);
  std::size_t filled = sizeof(Header);
  for (const iovec& before : pieces.first(pieces.size() - 1)) {
    std::memcpy(sending.data + filled, before.iov_base, before.iov_len);
    filled += before.iov_len;
  }
  const std::size_t all = filled - sizeof(Header) + word.bytes;
  const WrittenTrailer last{word.number, word.bytes};
  std::memcpy(sending.data + filled, &last, sizeof last);
  stream.taken += all;
  send_segment(stream, sending, filled + sizeof last, MessageType::written);
  return all;
}

void StreamMux::written(Writing& writing) {
  Stream& stream = *writing.stream;
  writing.is_through = true;
  if (writing.entry != nullptr) cache_.release(std::exchange(writing.entry, nullptr));
  while (!stream.writings.empty() && stream.writings.front().is_through) stream.writings.pop_front();
  ring_doorbell(stream);
}

std::size_t StreamMux::bytes_in_flight(Stream* stream) {
  std::lock_guard lock(mutex_);
  if (!stream->writings.empty()) progress_if_due();
  stream->reported_in_flight = stream->bytes_in_flight();
  return stream->reported_in_flight;
}

// --- taking back -----------------------------------------------------------------------------------------------------
//
// A grant follows the rule of shared tensors (ShmNode::begin_use) and of windows on devices (netfold/torch/device/
// ipc.py): memory that others touch is a lease with an owner, its users are counted, and a revoke waits for them. The
// means differ, since the user here is the network adapter of another host, which reads no flag before it writes:
//
//   owner      the receiver, who granted; `grants_` holds the registration's lease until the grant is landed or over
//   user       one rank, the writer of this stream. It counts its writes, and the owner counts those that have landed
//   revoke     the owner says so once (`is_cancelling`), the writer answers with its count (`confirm_cancel`) and begins no write
//              after that. The memory is the owner's again once as many writes have landed
//   no answer  within Mesh's kCancelNs, or from a rank that is dead: `force_close` closes the endpoint with its
//              registrations, and the adapter refuses what still comes
//
// So no write can land in memory that its owner has back, whatever the writer does and whenever it stops.

bool StreamMux::cancel(Stream* stream) {
  std::lock_guard lock(mutex_);
  progress();
  return is_cancel_complete(*stream);
}

// Or begins to: what was granted is revoked, once.
bool StreamMux::is_cancel_complete(Stream& stream) {
  stream.reported_in_flight = stream.bytes_in_flight();
  if (stream.open_grants > 0 && !stream.is_cancelling) {
    stream.is_cancelling = stream.owes_cancel = true;
    // What was not told yet was never granted, and `grants_` still has it: told of or not, it is over.
    stream.to_tell.clear();
    send_credit(stream);
  }
  const bool is_all_here = stream.cancelled_writes && *stream.cancelled_writes == stream.landed;
  if (stream.open_grants > 0 && !is_all_here) return false;
  if (stream.open_grants > 0) {
    for (auto& [number, grant] : grants_) {
      if (grant.stream != &stream || grant.state != Grant::State::open) continue;
      grant.state = Grant::State::over;
      cache_.release(std::exchange(grant.entry, nullptr));
      ++counters_.grants_cancelled;
    }
    stream.open_grants = 0;
  }
  return stream.writings.empty();
}

void StreamMux::confirm_cancel(Stream* stream, std::uint32_t writes) {
  std::lock_guard lock(mutex_);
  stream->cancelled_writes = writes;
}

StreamMux::FinalCounts StreamMux::final_counts(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return {stream->sent, stream->writes};
}

bool StreamMux::is_open() const {
  std::lock_guard lock(mutex_);
  return !rails_.empty();
}

void StreamMux::force_close(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!rails_.empty()) close_endpoint(why);
}

void StreamMux::close_endpoint(const std::string& why) {
  for (auto& [tag, stream] : streams_) fail(*stream, "the endpoint was closed: " + why);
  for (auto& rail : rails_) rail->close();
  cache_.clear();
  for (auto& slab : slabs_) slab->registrations.clear();
  rails_.clear();
  const auto forget_work = [](Stream& stream) {
    stream.writings.clear();
    stream.open_grants = 0;
    stream.under_way = 0;
    stream.is_pending = false;
    for (Sending& sending : stream.slab->sendings) sending.state = Sending::State::free;
  };
  for (auto& [tag, stream] : streams_) forget_work(*stream);
  for (auto& stream : leaving_) spare_.push_back(stream->slab);
  leaving_.clear();
  for (auto& [number, grant] : grants_) {
    if (grant.state == Grant::State::open) grant.state = Grant::State::over;
    grant.entry = nullptr;
  }
  unposted_.clear();
  pending_.clear();
}

}  // namespace netfold::transport::fabric
