#include "stream_mux_parts.hpp"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

namespace netfold::transport::fabric {
namespace {

Fd make_event(unsigned value) {
  Fd event(eventfd(value, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event) throw_errno("eventfd");
  return event;
}

std::uint64_t random_bits() {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom");
  return bits;
}

void add_once(int fd, std::vector<pollfd>& fds) {
  const auto same = [&](const pollfd& each) { return each.fd == fd; };
  if (std::none_of(fds.begin(), fds.end(), same)) fds.push_back({fd, POLLIN, 0});
}

std::vector<Endpoint::Limits> limits_of(const std::vector<std::unique_ptr<Endpoint>>& rails) {
  std::vector<Endpoint::Limits> limits;
  for (const auto& rail : rails) limits.push_back(rail->limits());
  return limits;
}

}  // namespace

Doorbell::Doorbell() : event(make_event(0)) {}

StreamMux::StreamMux(std::vector<std::unique_ptr<Endpoint>> rails)
    : rails_(std::move(rails)),
      limits_(limits_of(rails_)),
      cache_(*rails_.front()),
      peers_(rails_.size()),
      ready_(make_event(1)),
      wake_timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      pid_(getpid()) {
  if (!wake_timer_) throw_errno("timerfd_create");
  segment_bytes_ = kMaxSegmentBytes;
  for (const auto& rail : rails_) {
    segment_bytes_ = std::min(segment_bytes_, rail->limits().message_bytes);
    const int least_bits = rail->limits().is_private ? 15 : 48;
    if (rail->limits().tag_bits < least_bits || rail->limits().message_bytes < 2 * sizeof(Header)) {
      throw Error("provider " + limits().provider + " has tags of " + std::to_string(rail->limits().tag_bits) +
                  " bits and messages of " + std::to_string(rail->limits().message_bytes) + " bytes; netfold needs " +
                  std::to_string(least_bits) + " bits and " + std::to_string(2 * sizeof(Header)) + " bytes");
    }
  }
  segment_bytes_ = segment_bytes_ / sizeof(Header) * sizeof(Header);
}

StreamMux::~StreamMux() {
  if (pid_ == getpid()) {
    // Endpoints go before the memory that they may still know.
    cache_.clear();
    for (auto& slab : slabs_) slab->registrations.clear();
    rails_.clear();
    return;
  }
  // A child of fork: what the provider shares with its parent is not ours to close.
  cache_.abandon();
  for (auto& rail : rails_) static_cast<void>(rail.release());
  for (auto& slab : slabs_) {
    for (auto& registration : slab->registrations) static_cast<void>(registration.release());
  }
}

std::vector<std::vector<std::byte>> StreamMux::names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::vector<std::byte>> names;
  for (const auto& rail : rails_) names.push_back(rail->name());
  return names;
}

StreamMux::Slab* StreamMux::take_slab(std::uint32_t window) {
  const auto fits = [&](const Slab* slab) { return slab->window == window; };
  if (const auto found = std::find_if(spare_.begin(), spare_.end(), fits); found != spare_.end()) {
    Slab* slab = *found;
    spare_.erase(found);
    return slab;
  }
  auto slab = std::make_unique<Slab>();
  const std::size_t incoming = window * rails_.size();
  slab->window = window;
  slab->bytes = (incoming + window) * segment_bytes_ + sizeof(Header) + grant_message_bytes();
  void* memory = mmap(nullptr, slab->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error("no memory for the buffers of a fabric: " + std::to_string(slab->bytes) + " bytes");
  slab->memory = static_cast<std::byte*>(memory);
  if (limits().needs_registration) {
    for (const auto& rail : rails_) {
      slab->registrations.push_back(rail->register_memory(slab->memory, slab->bytes, Access::messages));
    }
  }
  std::byte* next = slab->memory;
  slab->sendings.resize(window + 2);
  for (std::size_t i = 0; i < slab->sendings.size(); ++i) {
    Sending& sending = slab->sendings[i];
    sending.slab = slab.get();
    sending.data = next;
    next += i < window ? segment_bytes_ : i == window ? sizeof(Header) : grant_message_bytes();
  }
  slab->receivings.resize(incoming);
  for (std::size_t i = 0; i < incoming; ++i) {
    Receiving& receiving = slab->receivings[i];
    receiving.slab = slab.get();
    receiving.data = next;
    receiving.rail = i % rails_.size();
    next += segment_bytes_;
  }
  used_bytes_ += slab->bytes;
  slabs_.push_back(std::move(slab));
  for (Receiving& receiving : slabs_.back()->receivings) post(receiving);
  return slabs_.back().get();
}

StreamMux::Stream* StreamMux::open(std::shared_ptr<Doorbell> doorbell, std::size_t streams) {
  std::lock_guard lock(mutex_);
  if (rails_.empty()) throw Error("the endpoint of provider " + limits().provider + " was closed; open another port");
  const std::size_t share =
      (kBudgetBytes - std::min(kBudgetBytes, used_bytes_)) / 2 / std::max<std::size_t>(1, streams);
  const std::size_t fits = std::min<std::size_t>(kMaxWindow, share / (segment_bytes_ * (rails_.size() + 1)));
  // What others left behind is there in any case.
  if (fits == 0 && spare_.empty()) {
    throw Error("buffers for " + std::to_string(streams) + " more streams over provider " + limits().provider +
                " do not fit into the " + std::to_string(kBudgetBytes >> 20) +
                " MiB of this process; make fewer or smaller groups");
  }
  auto stream = std::make_unique<Stream>();
  stream->doorbell = std::move(doorbell);
  stream->slab = take_slab(fits == 0 ? spare_.front()->window : static_cast<std::uint32_t>(std::bit_floor(fits)));
  for (Sending& sending : stream->slab->sendings) sending.stream = stream.get();
  stream->arrived.resize(stream->window());
  if (obstacle().empty()) stream->rma_min_bytes = settings_.rma_min_bytes;
  const std::uint64_t usable = ~std::uint64_t{0} >> (64 - limits().tag_bits);
  do {
    stream->tag_in = random_bits() & usable;
  } while (streams_.contains(stream->tag_in));
  return streams_.emplace(stream->tag_in, std::move(stream)).first->second.get();
}

StreamMux::StreamParams StreamMux::params(const Stream* stream) const {
  return {stream->tag_in, stream->window(), static_cast<std::uint32_t>(segment_bytes_), stream->rma_min_bytes};
}

void StreamMux::connect(Stream* stream, const std::vector<std::vector<std::byte>>& names, const StreamParams& theirs) {
  std::lock_guard lock(mutex_);
  if (names.size() != rails_.size() || theirs.segment_bytes != segment_bytes_ || theirs.window == 0) {
    throw Error("the other rank has " + std::to_string(names.size()) + " rails and segments of " +
                std::to_string(theirs.segment_bytes) + " bytes, this one " + std::to_string(rails_.size()) + " and " +
                std::to_string(segment_bytes_) + "; both need the same provider and interfaces alike");
  }
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    // Once each: not every provider takes an address that it has.
    const std::string name(reinterpret_cast<const char*>(names[rail].data()), names[rail].size());
    const auto [known, is_new] = peers_[rail].try_emplace(name, 0);
    if (is_new) known->second = rails_[rail]->add(names[rail]);
    stream->peers.push_back(known->second);
  }
  stream->is_out.resize(rails_.size());
  stream->tag_out = theirs.tag;
  // Our own slots bound what is under way as well.
  stream->window_out = std::min(theirs.window, stream->window());
  const bool both = stream->rma_min_bytes > 0 && theirs.rma_min_bytes > 0;
  stream->rma_min_bytes = both ? std::max<std::size_t>(stream->rma_min_bytes, theirs.rma_min_bytes) : 0;
}

void StreamMux::post(Receiving& receiving) {
  receiving.grant = nullptr;
  if (rails_.empty()) return;
  Endpoint& endpoint = *rails_[receiving.rail];
  switch (endpoint.receive(receiving.data, segment_bytes_, receiving.slab->descriptor(receiving.rail), &receiving)) {
    case Endpoint::Taken::yes:
      return;
    case Endpoint::Taken::later:
      ++counters_.refused;
      unposted_.push_back(&receiving);
      return;
    case Endpoint::Taken::never:
      for (auto& [tag, stream] : streams_) fail(*stream, "buffers cannot be posted: " + endpoint.why());
  }
}

// Never: that rail is out, and what else it had is queued for others.
Endpoint::Taken StreamMux::hand_over(Sending& sending) {
  Stream& stream = *sending.stream;
  Endpoint& endpoint = *rails_[sending.rail];
  const bool injects = sending.bytes <= endpoint.limits().inject_bytes;
  const auto taken = injects ? endpoint.inject(stream.peers[sending.rail], sending.data, sending.bytes, stream.tag_out)
                             : endpoint.send(stream.peers[sending.rail], sending.data, sending.bytes,
                                             sending.slab->descriptor(sending.rail), stream.tag_out, &sending);
  switch (taken) {
    case Endpoint::Taken::yes:
      if (rails_.size() > 1) sending.sent_ns = now_ns();
      sending.state = injects ? Sending::State::free : Sending::State::under_way;
      stream.under_way += injects ? 0 : 1;
      break;
    case Endpoint::Taken::later:
      ++counters_.refused;
      sending.state = Sending::State::waiting;
      break;
    case Endpoint::Taken::never:
      sending.state = Sending::State::free;
      drop_rail(stream, sending.rail, endpoint.why());
  }
  return taken;
}

std::size_t StreamMux::send(Stream* to, std::span<const iovec> pieces) {
  std::lock_guard lock(mutex_);
  Stream& stream = *to;
  stream.doorbell->asleep = false;
  if (!stream.may_send()) progress_if_due();
  std::size_t all = 0;
  std::size_t piece = 0;
  std::size_t offset = 0;
  while (piece < pieces.size()) {
    if (!stream.may_send()) break;
    Sending& sending = stream.segment(stream.sent);
    std::size_t filled = sizeof(Header);
    while (piece < pieces.size() && filled < segment_bytes_) {
      const std::size_t some = std::min(pieces[piece].iov_len - offset, segment_bytes_ - filled);
      std::memcpy(sending.data + filled, static_cast<const std::byte*>(pieces[piece].iov_base) + offset, some);
      filled += some;
      offset += some;
      if (offset == pieces[piece].iov_len) {
        ++piece;
        offset = 0;
      }
    }
    if (filled == sizeof(Header)) break;
    all += filled - sizeof(Header);
    send_segment(stream, sending, filled, MessageType::segment);
  }
  stream.wants_offer = false;
  stream.taken += all;
  return all;
}

// The next one, whose bytes are in their place behind the header.
void StreamMux::send_segment(Stream& stream, Sending& sending, std::size_t bytes, MessageType type) {
  const Header header{.sequence = stream.sent,
                      .read = stream.read,
                      .bytes = static_cast<std::uint32_t>(bytes - sizeof(Header)),
                      .type = type};
  std::memcpy(sending.data, &header, sizeof header);
  sending.bytes = static_cast<std::uint32_t>(bytes);
  stream.told = stream.read;
  ++stream.sent;
  ++counters_.segments_sent;
  sending.rail = stream.take_rail();
  sending.state = Sending::State::waiting;
  stream.waiting.push_back(&sending);
  push(stream);
}

// Everything of a stream that was refused for now, oldest first.
void StreamMux::push(Stream& stream) {
  bool refused = stream.credit().state == Sending::State::waiting;
  while (!refused && !stream.waiting.empty()) {
    Sending& sending = *stream.waiting.front();
    stream.waiting.pop_front();
    refused = hand_over(sending) == Endpoint::Taken::later;
    if (refused) stream.waiting.push_front(&sending);
  }
  if (refused) push_later(stream);
}

void StreamMux::push_later(Stream& stream) {
  if (stream.is_pending) return;
  stream.is_pending = true;
  pending_.push_back(&stream);
}

void StreamMux::send_credit(Stream& stream) {
  Sending& credit = stream.credit();
  if (stream.peers.empty()) return;  // the other end met us first
  while (stream.why.empty() && credit.state != Sending::State::under_way) {
    const auto type = stream.owed();
    if (!type) return;
    const auto taken = send_control(stream, *type);
    if (taken == Endpoint::Taken::later) return push(stream);
    if (taken == Endpoint::Taken::never) continue;  // by another rail, if there is one
    stream.told = stream.read;
    if (type == MessageType::cancel) stream.owes_cancel = false;
    if (type == MessageType::cancelled) stream.owes_cancelled = false;
    if (type != MessageType::credit) continue;
    stream.is_asked = false;
    ++counters_.credits_sent;
  }
}

Endpoint::Taken StreamMux::send_control(Stream& stream, MessageType type) {
  Sending& credit = stream.credit();
  const Header header{.sequence = type == MessageType::cancelled ? stream.writes : stream.first_missing(),
                      .read = stream.read,
                      .type = type};
  std::memcpy(credit.data, &header, sizeof header);
  credit.bytes = sizeof header;
  credit.rail = stream.take_rail();
  return hand_over(credit);
}

// A rail may die without a word, and who reads late looks the same: so the other end is asked what has come, over the
// rails in turn. What was sent long before such an answer and is not in it was lost with its rail.
void StreamMux::look_for_losses() {
  const std::int64_t now = now_ns();
  for (auto& [tag, each] : streams_) {
    Stream& stream = *each;
    if (!stream.why.empty() || stream.confirmed == stream.sent) continue;
    const bool is_new = now - stream.segment(stream.confirmed).sent_ns < kAskNs;
    if (is_new || now - stream.asked_ns < kAskNs || stream.credit().state != Sending::State::free) continue;
    stream.asked_ns = now;
    // Refused for now: asked again soon enough.
    if (send_control(stream, MessageType::probe) == Endpoint::Taken::later)
      stream.credit().state = Sending::State::free;
  }
}

void StreamMux::handle_probe_reply(Stream& stream, std::uint32_t first_missing) {
  if (first_missing - stream.confirmed > stream.sent - stream.confirmed) return;  // an old one
  stream.arrived_there = first_missing;
  if (first_missing == stream.sent || stream.rails_left() < 2) return;
  Sending& missing = stream.segment(first_missing);
  const bool is_old = missing.state == Sending::State::free && now_ns() - missing.sent_ns > kLostNs;
  if (is_old) drop_rail(stream, missing.rail, "nothing that went over it arrived");
}

std::size_t StreamMux::receive(Stream* from, std::span<const iovec> pieces) {
  std::lock_guard lock(mutex_);
  Stream& stream = *from;
  stream.doorbell->asleep = false;
  send_grants(stream);
  if (stream.head() == nullptr) progress();
  std::size_t all = 0;
  for (const iovec& piece : pieces) {
    std::size_t filled = 0;
    while (filled < piece.iov_len) {
      Receiving* head = stream.head();
      if (head == nullptr) break;
      const bool is_inside = stream.offset < head->bytes;
      const std::byte* source =
          is_inside ? head->data + sizeof(Header) + stream.offset : head->grant->into + (stream.offset - head->bytes);
      const std::uint32_t whole = head->bytes + (head->grant != nullptr ? head->grant->bytes : 0);
      const std::size_t some =
          std::min<std::size_t>(piece.iov_len - filled, (is_inside ? head->bytes : whole) - stream.offset);
      // What was written lies where it is wanted, of who keeps to what was expected.
      auto* into = static_cast<std::byte*>(piece.iov_base) + filled;
      if (into != source) std::memmove(into, source, some);
      filled += some;
      stream.offset += static_cast<std::uint32_t>(some);
      if (stream.offset < whole) continue;
      if (head->grant != nullptr) {
        grants_.erase(head->grant->number);
        head->grant = nullptr;
        --stream.grants;
      }
      stream.arrived[stream.read % stream.window()] = nullptr;
      stream.offset = 0;
      ++stream.read;
      post(*head);
      send_credit(stream);
    }
    all += filled;
    if (filled < piece.iov_len) break;
  }
  return all;
}

bool StreamMux::progress() {
  bool moved = false;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    for (int round = 0; round < kRounds; ++round) {
      const std::size_t found = rails_[rail]->poll(batch_);
      for (std::size_t i = 0; i < found; ++i) {
        const Completion& completion = batch_[i];
        switch (completion.kind) {
          case Completion::Kind::sent:
            if (static_cast<Job&>(*completion.work).kind == Job::Kind::write) {
              written(static_cast<Writing&>(*completion.work));
            } else {
              sent(static_cast<Sending&>(*completion.work));
            }
            break;
          case Completion::Kind::landed:
            landed(static_cast<std::uint32_t>(completion.tag));
            break;
          case Completion::Kind::received:
            received(static_cast<Receiving&>(*completion.work), completion.bytes, completion.tag);
            break;
          case Completion::Kind::failed:
            failed(completion, rail);
        }
      }
      moved |= found > 0;
      if (found < batch_.size()) break;
    }
  }
  if (!unposted_.empty()) {
    const auto again = std::exchange(unposted_, {});
    for (Receiving* receiving : again) post(*receiving);
  }
  if (!pending_.empty()) {
    const auto again = std::exchange(pending_, {});
    for (Stream* stream : again) {
      stream->is_pending = false;
      // Said anew: more may have been read since.
      if (stream->credit().state == Sending::State::waiting) stream->credit().state = Sending::State::free;
      send_credit(*stream);
      push(*stream);
      send_grants(*stream);
    }
  }
  if (rails_.size() > 1) look_for_losses();
  looked_ns_ = moved ? 0 : now_ns();
  return moved;
}

void StreamMux::progress_if_due() {
  if (now_ns() - looked_ns_ >= kMinProgressIntervalNs) progress();
}

void StreamMux::sent(Sending& sending) {
  Stream& stream = *sending.stream;
  --stream.under_way;
  sending.state = Sending::State::free;
  if (&sending == &stream.credit()) {
    send_credit(stream);  // what was read since
  } else if (&sending == &stream.granting()) {
    send_grants(stream);  // those since
  } else {
    // The rail was dropped while this was under way: whether it arrived is not known.
    if (stream.is_out[sending.rail] && stream.why.empty()) repeat(stream, sending.rail);
    ring_doorbell(stream);
  }
  if (stream.is_leaving && stream.under_way == 0) forget(stream);
}

bool StreamMux::is_sound(MessageType type, std::size_t bytes) {
  if (type == MessageType::segment) return bytes > 0;
  if (type == MessageType::written) return bytes >= sizeof(WrittenTrailer);
  if (type == MessageType::grant) return bytes > 0 && bytes % sizeof(GrantEntry) == 0;
  return bytes == 0;
}

void StreamMux::received(Receiving& receiving, std::size_t bytes, std::uint64_t tag) {
  failed_receives_ = 0;
  Header header;
  const auto found = streams_.find(tag);
  if (bytes >= sizeof header) std::memcpy(&header, receiving.data, sizeof header);
  if (found == streams_.end() || bytes < sizeof header || header.magic != kMagic ||
      header.bytes != bytes - sizeof header || !is_sound(header.type, header.bytes)) {
    ++counters_.rejected;
    return post(receiving);
  }
  Stream& stream = *found->second;
  const std::uint32_t news = header.read - stream.confirmed;
  if (news > 0 && news <= stream.sent - stream.confirmed) {
    stream.confirmed = header.read;
    // What was read has come.
    if (stream.arrived_there - stream.confirmed > stream.sent - stream.confirmed) stream.arrived_there = header.read;
    ring_doorbell(stream);
  }
  if (header.type != MessageType::segment && header.type != MessageType::written) {
    if (header.type == MessageType::grant) granted(stream, receiving.data + sizeof header, header.bytes);
    if (header.type == MessageType::cancelled) stream.cancelled_writes = header.sequence;
    if (header.type == MessageType::cancel) {
      stream.is_cancelled = stream.owes_cancelled = true;
      stream.offers.clear();
    }
    if (rails_.size() > 1 && header.type <= MessageType::probe) handle_probe_reply(stream, header.sequence);
    stream.is_asked |= header.type == MessageType::probe;
    post(receiving);
    return send_credit(stream);
  }
  ++counters_.segments_received;
  const std::uint32_t ahead = header.sequence - stream.read;
  Receiving*& place = stream.arrived[header.sequence % stream.window()];
  if (ahead >= stream.window() || place != nullptr) {
    ++counters_.repeated;
    // Who says again what we have read has not heard so.
    stream.told = stream.read - stream.window();
    post(receiving);
    return send_credit(stream);
  }
  if (ahead > 0 && stream.head() == nullptr) ++counters_.out_of_order;
  receiving.bytes = header.bytes;
  if (header.type == MessageType::written && !place_written(stream, receiving)) {
    ++counters_.rejected;
    return post(receiving);
  }
  if (receiving.grant != nullptr && limits().orders_writes) landed(receiving.grant->number);
  place = &receiving;
  if (ahead == 0) ring_doorbell(stream);
}

void StreamMux::failed(const Completion& completion, std::size_t rail) {
  if (completion.work == nullptr) {
    for (auto& [tag, stream] : streams_) fail(*stream, completion.why);
    return;
  }
  auto& job = static_cast<Job&>(*completion.work);
  if (job.kind == Job::Kind::write) {
    auto& writing = static_cast<Writing&>(job);
    fail(*writing.stream, "writing to the peer's memory failed: " + completion.why);
    return written(writing);
  }
  if (job.kind == Job::Kind::send) {
    auto& sending = static_cast<Sending&>(job);
    Stream& stream = *sending.stream;
    sending.state = Sending::State::free;
    --stream.under_way;
    if (!stream.is_leaving) return drop_rail(stream, rail, completion.why);
    if (stream.under_way == 0) forget(stream);
    return;
  }
  // A message that was too long, from who does not keep to the terms; or an endpoint that is no good any more.
  ++counters_.rejected;
  if (++failed_receives_ == kMaxFailedReceives) {
    for (auto& [tag, stream] : streams_) fail(*stream, "nothing can be received: " + completion.why);
  }
  if (failed_receives_ < kMaxFailedReceives) post(static_cast<Receiving&>(job));
}

void StreamMux::drop_rail(Stream& stream, std::size_t rail, const std::string& why) {
  if (!stream.is_out[rail]) ++counters_.rails_lost;
  stream.is_out[rail] = true;
  if (stream.rails_left() == 0) return fail(stream, "sending failed: " + why);
  repeat(stream, rail);
}

// What a rail that is out took and the peer has not read goes again over another one: whether it arrived is not known.
// What is still under way on it follows when it completes, since its memory is the provider's until then.
void StreamMux::repeat(Stream& stream, std::size_t rail) {
  const auto left = std::find(stream.is_out.begin(), stream.is_out.end(), false);
  for (std::uint32_t number = stream.sent; number != stream.confirmed; --number) {
    Sending& sending = stream.segment(number - 1);
    if (sending.rail != rail || sending.state == Sending::State::under_way) continue;
    sending.rail = static_cast<std::size_t>(left - stream.is_out.begin());
    if (sending.state == Sending::State::waiting) std::erase(stream.waiting, &sending);
    sending.state = Sending::State::waiting;
    stream.waiting.push_front(&sending);
  }
  if (!stream.waiting.empty()) push_later(stream);
}

void StreamMux::fail(Stream& stream, const std::string& why) {
  if (!stream.why.empty()) return;
  const std::string provider = "provider " + limits().provider;
  stream.why = why.starts_with(provider) ? why : provider + ": " + why;
  for (Sending* sending : stream.waiting) sending->state = Sending::State::free;
  stream.waiting.clear();
  if (stream.credit().state == Sending::State::waiting) stream.credit().state = Sending::State::free;
  ring_doorbell(stream);
}

void StreamMux::ring_doorbell(Stream& stream) {
  if (!stream.doorbell->asleep) return;
  stream.doorbell->asleep = false;
  stream.doorbell->is_rung = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stream.doorbell->event.get(), &one, sizeof one);
}

void StreamMux::make_progress() {
  std::lock_guard lock(mutex_);
  progress();
}

bool StreamMux::is_settled(const Stream& stream) const { return stream.under_way == 0 && !stream.is_pending; }

bool StreamMux::settled(Stream* stream) {
  std::lock_guard lock(mutex_);
  // Over several rails it may have to go again.
  const auto is_through = [&] {
    const bool arrived = rails_.size() == 1 || stream->arrived_there == stream->sent;
    return (is_settled(*stream) && arrived) || !stream->why.empty();
  };
  if (!is_through()) progress();
  return is_through();
}

std::string StreamMux::failure(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return stream->why;
}

std::uint32_t StreamMux::read(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return stream->read;
}

std::size_t StreamMux::unconfirmed(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return stream->why.empty() && !is_settled(*stream) ? stream->under_way * segment_bytes_ : 0;
}

void StreamMux::wait_for(Stream* stream, short events, std::vector<pollfd>& fds) {
  std::lock_guard lock(mutex_);
  const bool reads = (events & POLLIN) != 0 && stream->head() != nullptr;
  const bool has_place = !stream->wants_offer || !stream->offers.empty();
  const bool sends = (events & POLLOUT) != 0 && stream->may_send() && has_place && !stream->is_refused;
  const bool has_back = stream->bytes_in_flight() != stream->reported_in_flight;
  send_grants(*stream);
  if (reads || sends || has_back || !stream->why.empty()) return add_once(ready_.get(), fds);
  Doorbell& doorbell = *stream->doorbell;
  if (std::exchange(doorbell.is_rung, false)) {
    std::uint64_t rung = 0;
    [[maybe_unused]] const auto drained = ::read(doorbell.event.get(), &rung, sizeof rung);
  }
  doorbell.asleep = true;
  add_once(doorbell.event.get(), fds);
  // What was refused may go without a completion before it.
  bool polls = !pending_.empty() || !unposted_.empty() || stream->is_refused;
  for (const auto& rail : rails_) {
    if (!rail->may_sleep()) {
      add_once(ready_.get(), fds);
    } else if (rail->wait_fd() >= 0) {
      add_once(rail->wait_fd(), fds);
    }
    polls |= rail->wait_fd() < 0;
  }
  const bool asks = rails_.size() > 1 && stream->confirmed != stream->sent;
  if (polls || asks) wake_after(fds, polls ? kPollIntervalNs : kAskNs);
}

void StreamMux::wake_after(std::vector<pollfd>& fds, std::int64_t delay_ns) {
  const itimerspec once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = delay_ns}};
  timerfd_settime(wake_timer_.get(), 0, &once, nullptr);
  add_once(wake_timer_.get(), fds);
}

StreamMux::FinalCounts StreamMux::close(Stream* stream) {
  std::vector<pollfd> fds;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      progress();
      if (stream->doorbell->close_ns < 0) stream->doorbell->close_ns = now_ns() + kFlushNs;
      const bool is_seen_off = is_settled(*stream) || !stream->why.empty();
      if ((is_cancel_complete(*stream) && is_seen_off) || now_ns() >= stream->doorbell->close_ns) break;
    }
    fds.clear();
    wait_for(stream, 0, fds);
    ::poll(fds.data(), fds.size(), 1);
  }
  std::lock_guard lock(mutex_);
  if (!is_cancel_complete(*stream)) close_endpoint("memory that a stream had lent was not given back");
  const FinalCounts last{stream->sent, stream->writes};
  auto owned = std::move(streams_.extract(stream->tag_in).mapped());
  for (Receiving* held : stream->arrived) {
    if (held != nullptr) post(*held);
  }
  fail(*stream, "this rank closed the stream");
  std::erase(pending_, stream);
  std::erase_if(grants_, [&](const auto& each) { return each.second.stream == stream; });
  stream->is_leaving = true;
  if (stream->under_way > 0) {
    leaving_.push_back(std::move(owned));
  } else {
    spare_.push_back(stream->slab);
  }
  return last;
}

void StreamMux::forget(Stream& stream) {
  spare_.push_back(stream.slab);
  std::erase_if(leaving_, [&](const auto& each) { return each.get() == &stream; });
}

StreamMux::Counters StreamMux::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.registrations = cache_.counters();
  return counters;
}

}  // namespace netfold::transport::fabric
