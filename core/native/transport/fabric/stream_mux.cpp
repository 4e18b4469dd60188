#include <unistd.h>
#include <netfold/transport/fabric/stream_mux.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace netfold::transport::fabric {
namespace {

// An offer of a stream, as it travels; the name of each rail's endpoint follows behind its length. Little-endian.
struct Offer {
  std::uint64_t tag = 0;
  std::uint32_t window = 0;         // segments
  std::uint32_t segment_bytes = 0;  // of the longest segment
  std::uint32_t rails = 0;
  std::uint32_t reserved = 0;
};

template <class Value>
void append(std::vector<std::byte>& bytes, const Value& value) {
  bytes.resize(bytes.size() + sizeof value);
  std::memcpy(bytes.data() + bytes.size() - sizeof value, &value, sizeof value);
}

// Takes a value from the front. False: the bytes end before it does.
template <class Value>
bool take(std::span<const std::byte>& bytes, Value& value) {
  if (bytes.size() < sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes = bytes.subspan(sizeof value);
  return true;
}

void add_once(int fd, std::vector<pollfd>& fds) {
  const auto is_same = [&](const pollfd& each) { return each.fd == fd; };
  if (std::ranges::none_of(fds, is_same)) fds.push_back({fd, POLLIN, 0});
}

}  // namespace

StreamMux::StreamMux(std::vector<std::unique_ptr<Endpoint>> rails)
    : state_(std::move(rails)),
      cache_(*state_.rails.front()),
      peers_(state_.rails.size()),
      wake_timer_(make_timer()),
      pid_(getpid()) {
  // Memory that cannot be registered is an error at the start of a job, not at its first operation.
  const Mapping memory = map_buffers(slab_bytes(kMaxWindow));
  register_buffers(memory);
}

StreamMux::~StreamMux() {
  if (pid_ == getpid()) {
    // Endpoints end before the memory that they may still know.
    cache_.clear();
    flush_registration_.reset();
    for (auto& slab : slabs_) slab->registrations.clear();
    state_.rails.clear();
    return;
  }
  // A child of fork must not close what the provider shares with its parent.
  cache_.abandon();
  static_cast<void>(flush_registration_.release());
  for (auto& rail : state_.rails) static_cast<void>(rail.release());
  for (auto& slab : slabs_) {
    for (auto& registration : slab->registrations) static_cast<void>(registration.release());
  }
}

void StreamMux::set(const Settings& settings) {
  std::lock_guard lock(mutex_);
  settings_ = settings;
  cache_.limit(settings.registrations);
}

StreamMux::Counters StreamMux::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = state_.counters;
  counters.registrations = cache_.counters();
  counters.streams = state_.streams.size() + leaving_.size();
  counters.receive_bytes = 0;
  for (const auto& slab : slabs_) counters.receive_bytes += slab->receive_buffers.size() * state_.segment_bytes;
  for (const auto& rail : peers_) counters.addresses += rail.size();
  return counters;
}

// --- Set-up and end of streams ---------------------------------------------------------------------------------------

// A slab with the widest window that fits, among those that streams left and new ones.
Slab* StreamMux::take_slab() {
  constexpr std::size_t kParts = 32;
  const std::size_t least = slab_bytes(1);
  const std::size_t to_come = max_streams() - std::min(max_streams(), slabs_.size() + 1);
  const std::size_t taken = slab_bytes_ + to_come * least;
  const std::size_t most = (kBudgetBytes - std::min(kBudgetBytes, taken)) / kParts;
  for (std::uint32_t window = kMaxWindow;; window /= 2) {
    // Without room for a new slab, one of any window will do.
    const bool is_last = window == 1;
    const auto fits = [&](const Slab* slab) { return slab->window == window || is_last; };
    if (const auto found = std::ranges::find_if(spare_slabs_, fits); found != spare_slabs_.end()) {
      Slab* slab = *found;
      spare_slabs_.erase(found);
      return slab;
    }
    if (is_last || slab_bytes(window) <= most) return make_slab(window);
  }
}

Mapping StreamMux::map_buffers(std::size_t bytes) {
  Mapping memory = Mapping::anonymous(bytes);
  if (!memory) throw Error("no memory for the buffers of a fabric: " + std::to_string(bytes) + " bytes");
  return memory;
}

std::vector<std::unique_ptr<Registration>> StreamMux::register_buffers(const Mapping& memory) {
  std::vector<std::unique_ptr<Registration>> by_rail;
  if (!limits().needs_registration) return by_rail;
  for (const auto& rail : state_.rails) {
    by_rail.push_back(rail->register_memory(memory.data(), memory.bytes(), Access::messages, Memory()));
  }
  return by_rail;
}

Slab* StreamMux::make_slab(std::uint32_t window) {
  auto slab = std::make_unique<Slab>();
  const std::size_t segment_bytes = state_.segment_bytes;
  const std::size_t incoming = window * rails();
  const std::size_t bytes = slab_bytes(window);
  slab->window = window;
  slab->memory = map_buffers(bytes);
  slab->registrations = register_buffers(slab->memory);
  std::byte* next = slab->memory.data();
  slab->send_buffers.resize(window + 2);
  for (std::size_t i = 0; i < slab->send_buffers.size(); ++i) {
    SendBuffer& buffer = slab->send_buffers[i];
    buffer.slab = slab.get();
    buffer.data = next;
    next += i < window ? segment_bytes : i == window ? sizeof(MessageHeader) : grants_.message_bytes();
  }
  slab->receive_buffers.resize(incoming);
  for (std::size_t i = 0; i < incoming; ++i) {
    ReceiveBuffer& buffer = slab->receive_buffers[i];
    buffer.slab = slab.get();
    buffer.data = std::exchange(next, next + segment_bytes);
    buffer.rail = i % rails();
  }
  slab_bytes_ += bytes;
  slabs_.push_back(std::move(slab));
  for (ReceiveBuffer& buffer : slabs_.back()->receive_buffers) receiver_.post(buffer);
  return slabs_.back().get();
}

Stream* StreamMux::open(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<ReadableStreams> readable, int peer) {
  std::lock_guard lock(mutex_);
  if (state_.rails.empty()) {
    throw Error("the endpoint of " + state_.provider() + " was closed; open another StreamMux");
  }
  if (state_.streams.size() + leaving_.size() >= max_streams()) {
    throw Error("this process has " + std::to_string(max_streams()) + " streams over " + state_.provider() +
                ", the most whose buffers it may have (" + std::to_string(kBudgetBytes >> 20) +
                " MiB); try an algorithm by which a rank needs few others (NETFOLD_ALGORITHM=ring), fewer or smaller "
                "groups, or TCP (NETFOLD_TRANSPORT=tcp)");
  }
  auto stream = std::make_unique<Stream>();
  stream->doorbell = std::move(doorbell);
  stream->readable = std::move(readable);
  stream->peer = peer;
  stream->slab = take_slab();
  for (SendBuffer& buffer : stream->slab->send_buffers) buffer.stream = stream.get();
  stream->received.resize(stream->window());
  const std::uint64_t usable_bits = ~std::uint64_t{0} >> (64 - limits().tag_bits);
  do {
    stream->receive_tag = random_bits() & usable_bits;
  } while (state_.streams.contains(stream->receive_tag));
  return state_.streams.emplace(stream->receive_tag, std::move(stream)).first->second.get();
}

std::vector<std::byte> StreamMux::offer(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  const Offer offer{.tag = stream->receive_tag,
                    .window = stream->window(),
                    .segment_bytes = static_cast<std::uint32_t>(state_.segment_bytes),
                    .rails = static_cast<std::uint32_t>(state_.rails.size())};
  std::vector<std::byte> bytes;
  append(bytes, offer);
  for (const auto& rail : state_.rails) {
    const auto name = rail->name();
    append(bytes, static_cast<std::uint32_t>(name.size()));
    bytes.insert(bytes.end(), name.begin(), name.end());
  }
  return bytes;
}

void StreamMux::connect(Stream* stream, std::span<const std::byte> bytes) {
  std::lock_guard lock(mutex_);
  if (state_.rails.empty()) throw Error("the endpoint of " + state_.provider() + " was closed");
  Offer offer;
  bool is_whole = take(bytes, offer);
  if (is_whole && (offer.rails != state_.rails.size() || offer.segment_bytes != state_.segment_bytes)) {
    throw Error("the other rank has " + std::to_string(offer.rails) + " rails and segments of " +
                std::to_string(offer.segment_bytes) + " bytes, this rank " + std::to_string(state_.rails.size()) +
                " and " + std::to_string(state_.segment_bytes) + "; both need the same provider and like interfaces");
  }
  std::vector<std::span<const std::byte>> names(state_.rails.size());
  for (auto& name : names) {
    std::uint32_t length = 0;
    is_whole = is_whole && take(bytes, length) && length <= bytes.size();
    if (!is_whole) break;
    name = bytes.first(length);
    bytes = bytes.subspan(length);
  }
  if (!is_whole || !bytes.empty() || offer.window == 0) throw Error("the other rank's offer of a stream is malformed");
  std::vector<Endpoint::Peer> peers;
  for (std::size_t rail = 0; rail < names.size(); ++rail) {
    // Add each name once: not every provider takes an address that it has.
    const std::string name(reinterpret_cast<const char*>(names[rail].data()), names[rail].size());
    auto known = peers_[rail].find(name);
    if (known == peers_[rail].end()) known = peers_[rail].emplace(name, state_.rails[rail]->add(names[rail])).first;
    peers.push_back(known->second);
  }
  stream->peers = std::move(peers);
  stream->rail_failed.resize(names.size());
  stream->send_tag = offer.tag;
  // This rank's own send buffers bound the window, too.
  stream->send_window = std::min(offer.window, stream->window());
  stream->owes_hello = true;
  sender_.send_due_control(*stream);
}

void StreamMux::greet(Stream* stream) {
  std::lock_guard lock(mutex_);
  stream->owes_hello = true;
  sender_.send_due_control(*stream);
}

void StreamMux::take_readable(ReadableStreams& readable, std::vector<int>& peers) {
  std::lock_guard lock(mutex_);
  if (!state_.streams.empty()) progress_if_due();
  for (Stream* stream : readable.streams) {
    stream->is_listed = false;
    peers.push_back(stream->peer);
  }
  readable.streams.clear();
}

StreamMux::FinalCounts StreamMux::close(Stream* stream) {
  std::vector<pollfd> fds;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      progress();
      if (stream->doorbell->close_ns < 0) stream->doorbell->close_ns = now_ns() + kFlushNs;
      const bool is_sent = stream->is_settled() || !stream->failure.empty();
      if ((grants_.cancel(*stream) && is_sent) || now_ns() >= stream->doorbell->close_ns) break;
    }
    fds.clear();
    wait_for(stream, 0, fds);
    ::poll(fds.data(), fds.size(), 1);
  }
  std::lock_guard lock(mutex_);
  if (!grants_.cancel(*stream)) {
    close_endpoint("a stream was closed while a peer or the provider could still use memory of its caller");
  }
  const FinalCounts counts{stream->sent, stream->writes_begun};
  leaving_.push_back(std::move(state_.streams.extract(stream->receive_tag).mapped()));
  for (ReceiveBuffer* buffer : stream->received) {
    if (buffer != nullptr) receiver_.post(*buffer);
  }
  state_.fail(*stream, "this rank closed the stream");
  std::erase(state_.pending, stream);
  grants_.forget_grants_of(*stream);
  if (stream->readable != nullptr) std::erase(stream->readable->streams, stream);
  stream->readable = nullptr;
  stream->is_leaving = true;
  forget_if_left(*stream);
  return counts;
}

void StreamMux::forget_if_left(Stream& stream) {
  if (!stream.is_leaving || stream.under_way > 0) return;
  spare_slabs_.push_back(stream.slab);
  std::erase_if(leaving_, [&](const auto& each) { return each.get() == &stream; });
}

void StreamMux::force_close(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!state_.rails.empty()) close_endpoint(why);
}

void StreamMux::close_endpoint(const std::string& why) {
  state_.fail_all("the endpoint was closed: " + why);
  for (auto& rail : state_.rails) rail->close();
  while (!flushes_.empty()) finish_flush(*flushes_.front(), "the endpoint was closed: " + why);
  flush_registration_.reset();
  cache_.clear();
  for (auto& slab : slabs_) slab->registrations.clear();
  state_.rails.clear();
  for (auto& [tag, stream] : state_.streams) {
    stream->writes.clear();
    stream->open_grants = 0;
    stream->under_way = 0;
    stream->is_pending = false;
    for (SendBuffer& buffer : stream->slab->send_buffers) buffer.state = SendBuffer::State::free;
  }
  for (auto& stream : leaving_) spare_slabs_.push_back(stream->slab);
  leaving_.clear();
  grants_.handle_endpoint_closed();
  receiver_.handle_endpoint_closed();
  state_.pending.clear();
}

// --- Calls of pipes --------------------------------------------------------------------------------------------------

std::size_t StreamMux::send(Stream* stream, std::span<const iovec> pieces) {
  std::lock_guard lock(mutex_);
  stream->doorbell->note_awake();
  if (!stream->may_send()) progress_if_due();
  return sender_.send(*stream, pieces);
}

std::size_t StreamMux::receive(Stream* stream, std::span<std::byte>& gpu, std::span<const iovec> pieces) {
  std::lock_guard lock(mutex_);
  stream->doorbell->note_awake();
  grants_.send_grants(*stream);
  if (stream->next_segment() == nullptr) progress();
  return receiver_.receive(*stream, gpu, pieces);
}

bool StreamMux::is_posted(Stream* stream, std::uint64_t name) {
  std::lock_guard lock(mutex_);
  if (!stream->offers.contains(name)) progress_if_due();
  stream->awaits_offer = !stream->offers.contains(name);
  return !stream->awaits_offer;
}

std::size_t StreamMux::put(Stream* stream, std::span<const iovec> pieces, std::uint64_t name, Pipe::GpuMemory* gpu) {
  std::lock_guard lock(mutex_);
  stream->doorbell->note_awake();
  if (!stream->may_send() || !stream->offers.contains(name)) progress_if_due();
  return grants_.put(*stream, pieces, name, gpu);
}

std::size_t StreamMux::bytes_in_flight(Stream* stream) {
  std::lock_guard lock(mutex_);
  if (!stream->writes.empty()) progress_if_due();
  stream->reported_in_flight = stream->bytes_in_flight();
  return stream->reported_in_flight;
}

bool StreamMux::cancel(Stream* stream) {
  std::lock_guard lock(mutex_);
  progress();
  return grants_.cancel(*stream);
}

bool StreamMux::has_arrived(const Stream& stream) const {
  const bool is_at_peer = !state_.has_several_rails() || stream.arrived == stream.sent;
  return (stream.is_settled() && is_at_peer) || !stream.failure.empty();
}

bool StreamMux::settled(Stream* stream) {
  std::lock_guard lock(mutex_);
  if (!has_arrived(*stream)) progress();
  return has_arrived(*stream);
}

std::size_t StreamMux::unconfirmed(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return stream->failure.empty() && !stream->is_settled() ? stream->under_way * state_.segment_bytes : 0;
}

// --- Progress and waiting --------------------------------------------------------------------------------------------

bool StreamMux::progress() {
  bool found_any = false;
  for (const auto& rail : state_.rails) {
    for (int round = 0; round < kRounds; ++round) {
      const std::size_t found = rail->poll(batch_);
      for (std::size_t i = 0; i < found; ++i) handle_completion(batch_[i]);
      found_any |= found > 0;
      if (found < batch_.size()) break;
    }
  }
  receiver_.post_refused();
  const auto refused = std::exchange(state_.pending, {});
  for (Stream* stream : refused) {
    stream->is_pending = false;
    sender_.retry(*stream);
    grants_.send_grants(*stream);
  }
  if (state_.rails.size() > 1) sender_.probe_for_losses();
  idle_since_ns_ = found_any ? 0 : now_ns();
  return found_any;
}

void StreamMux::progress_if_due() {
  if (now_ns() - idle_since_ns_ >= kMinProgressIntervalNs) progress();
}

void StreamMux::handle_completion(const Completion& completion) {
  switch (completion.kind) {
    case Completion::Kind::sent: {
      auto& operation = static_cast<Operation&>(*completion.work);
      if (operation.kind == Operation::Kind::write) {
        return grants_.handle_write_completed(static_cast<RmaWrite&>(operation));
      }
      if (operation.kind == Operation::Kind::read) return finish_flush(static_cast<GpuFlush&>(operation), "");
      auto& buffer = static_cast<SendBuffer&>(operation);
      Stream& stream = *buffer.stream;
      sender_.handle_sent(buffer);
      if (&buffer == &stream.grant_buffer()) grants_.send_grants(stream);
      return forget_if_left(stream);
    }
    case Completion::Kind::landed:
      return grants_.handle_landed(static_cast<std::uint32_t>(completion.tag));
    case Completion::Kind::received:
      return receiver_.handle_received(static_cast<ReceiveBuffer&>(*completion.work), completion.bytes, completion.tag);
    case Completion::Kind::failed:
      return handle_failure(completion);
  }
}

void StreamMux::handle_failure(const Completion& completion) {
  if (completion.work == nullptr) return state_.fail_all(completion.why);
  auto& operation = static_cast<Operation&>(*completion.work);
  switch (operation.kind) {
    case Operation::Kind::write: {
      auto& write = static_cast<RmaWrite&>(operation);
      state_.fail(*write.stream, "writing to the peer's memory failed: " + completion.why);
      return grants_.handle_write_completed(write);
    }
    case Operation::Kind::read:
      return finish_flush(static_cast<GpuFlush&>(operation), "reading memory of a GPU failed: " + completion.why);
    case Operation::Kind::send: {
      auto& buffer = static_cast<SendBuffer&>(operation);
      Stream& stream = *buffer.stream;
      sender_.handle_send_error(buffer, completion.why);
      return forget_if_left(stream);
    }
    case Operation::Kind::receive:
      // A peer sent a message that is too long, or the endpoint has failed.
      receiver_.handle_receive_error(static_cast<ReceiveBuffer&>(operation), completion.why);
  }
}

void StreamMux::wait_for(Stream* stream, short events, std::vector<pollfd>& fds) {
  std::lock_guard lock(mutex_);
  const bool can_read = (events & POLLIN) != 0 && stream->next_segment() != nullptr;
  const bool has_offer = !stream->awaits_offer || !stream->offers.empty();
  const bool can_send = (events & POLLOUT) != 0 && stream->may_send() && has_offer && !stream->write_refused;
  const bool is_less_in_flight = stream->bytes_in_flight() != stream->reported_in_flight;
  grants_.send_grants(*stream);
  if (can_read || can_send || is_less_in_flight || !stream->failure.empty()) {
    return add_once(always_readable(), fds);
  }
  const bool must_probe = state_.rails.size() > 1 && stream->confirmed != stream->sent;
  sleep_on(*stream->doorbell, fds, stream->write_refused, must_probe);
}

void StreamMux::wait_for_readable(Doorbell& doorbell, const ReadableStreams& readable, std::vector<pollfd>& fds) {
  std::lock_guard lock(mutex_);
  if (!readable.streams.empty()) return add_once(always_readable(), fds);
  if (!state_.streams.empty()) sleep_on(doorbell, fds, false, false);
}

void StreamMux::sleep_on(Doorbell& doorbell, std::vector<pollfd>& fds, bool must_poll, bool must_probe) {
  // The ring may be for a stream at which the driver looked before in this same round, so do not sleep now.
  if (doorbell.is_rung) add_once(always_readable(), fds);
  if (std::exchange(doorbell.is_rung, false)) clear(doorbell.event);
  doorbell.asleep = true;
  add_once(doorbell.event.get(), fds);
  // A refused call may succeed without a completion before it, so poll for it.
  must_poll |= !state_.pending.empty() || receiver_.has_unposted();
  for (const auto& rail : state_.rails) {
    if (!rail->may_sleep()) {
      add_once(always_readable(), fds);
    } else if (rail->wait_fd() >= 0) {
      add_once(rail->wait_fd(), fds);
    }
    must_poll |= rail->wait_fd() < 0;
  }
  if (must_poll || must_probe) wake_after(fds, must_poll ? kPollIntervalNs : Sender::kProbeIntervalNs);
}

void StreamMux::wake_after(std::vector<pollfd>& fds, std::int64_t delay_ns) {
  set_timer(wake_timer_, delay_ns);
  add_once(wake_timer_.get(), fds);
}

}  // namespace netfold::transport::fabric
