#include <netfold/transport/fabric/fabric_datagrams.hpp>

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace netfold::transport::fabric {
namespace {

// The least packet that holds a hello and a few values.
constexpr std::size_t kLeastPacketBytes = 640;
constexpr std::size_t kLeastBuffers = 16;
constexpr std::size_t kAlignment = 64;

}  // namespace

FabricDatagrams::FabricDatagrams(std::unique_ptr<Endpoint> endpoint, std::size_t packet_bytes,
                                 std::size_t in_flight_bytes, std::size_t peers)
    : endpoint_(std::move(endpoint)),
      packet_bytes_(std::min(packet_bytes, endpoint_->limits().message_bytes)),
      peers_(peers),
      silent_peers_(peers),
      pid_(getpid()) {
  const Endpoint::Limits& limits = endpoint_->limits();
  if (limits.tag_bits < kLeastTagBits || packet_bytes_ < kLeastPacketBytes) {
    throw Error(provider() + " has tags of " + std::to_string(limits.tag_bits) + " bits and messages of " +
                std::to_string(limits.message_bytes) + " bytes; packets of a switch need " +
                std::to_string(kLeastTagBits) + " bits and " + std::to_string(kLeastPacketBytes) + " bytes");
  }
  const std::size_t stride = (packet_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t wanted = std::max(kLeastBuffers, peers * (in_flight_bytes / packet_bytes_));
  const std::size_t most = kMaxBufferBytes / stride;
  const std::size_t sends = std::min({wanted, most / 3, std::max(limits.sends, kLeastBuffers)});
  const std::size_t receives = std::min({2 * wanted, most - most / 3, std::max(limits.receives, kLeastBuffers)});
  most_under_way_ = std::max<std::size_t>(1, sends / std::max<std::size_t>(1, peers));

  const std::size_t bytes = (sends + receives) * stride;
  memory_ = Mapping::anonymous(bytes);
  if (!memory_) throw Error("no memory for packets over a fabric: " + std::to_string(bytes) + " bytes");
  if (limits.needs_registration)
    registration_ = endpoint_->register_memory(memory_.data(), bytes, Access::messages, Memory());
  send_buffers_.resize(sends);
  receive_buffers_.resize(receives);
  std::byte* next = memory_.data();
  for (SendBuffer& buffer : send_buffers_) {
    buffer.data = std::exchange(next, next + stride);
    free_.push_back(&buffer);
  }
  for (ReceiveBuffer& buffer : receive_buffers_) {
    buffer.data = std::exchange(next, next + stride);
    post(buffer);
  }
  const std::uint64_t usable_bits = ~std::uint64_t{0} >> (64 - limits.tag_bits);
  for (Peer peer = 0; peer < peers; ++peer) {
    do {
      peers_[peer].receive_tag = random_bits() & usable_bits;
    } while (!by_tag_.emplace(peers_[peer].receive_tag, peer).second);
  }
}

FabricDatagrams::~FabricDatagrams() {
  if (pid_ == getpid()) return;
  // A child of fork must not close what the provider shares with its parent.
  static_cast<void>(registration_.release());
  static_cast<void>(endpoint_.release());
}

void FabricDatagrams::connect(Peer peer, std::span<const std::byte> name, std::uint64_t tag) {
  PeerState& state = peers_[peer];
  state.address = endpoint_->add(name);
  state.send_tag = tag;
  state.is_connected = true;
}

std::size_t FabricDatagrams::send(std::span<Run> runs) {
  std::size_t total = 0;
  for (Run& run : runs) {
    const std::size_t packets = run.pieces.size() / run.pieces_per_packet;
    // The peer helps to choose the length of a job's packets, so check it.
    if (run.packet_bytes > packet_bytes_) {
      ++counters_.send_errors;
      counters_.last_send_errno = EMSGSIZE;
      counters_.last_send_error = "a packet of " + std::to_string(run.packet_bytes) + " bytes over " + provider() +
                                  ", whose longest packet has " + std::to_string(packet_bytes_) + " bytes";
      run.taken = packets;
      total += packets;
      continue;
    }
    run.taken = std::min(packets, room(run.to));
    for (std::size_t number = 0; number < run.taken; ++number) take(run, number);
    send_waiting(peers_[run.to]);
    poll_interval_ns_ = kFirstIntervalNs;
    total += run.taken;
  }
  return total;
}

// Copies packet `number` of a run into a buffer, which waits to be sent.
void FabricDatagrams::take(const Run& run, std::size_t number) {
  SendBuffer& buffer = *free_.back();
  free_.pop_back();
  std::byte* next = buffer.data;
  for (const iovec& piece : run.pieces.subspan(number * run.pieces_per_packet, run.pieces_per_packet)) {
    if (piece.iov_len == 0) continue;
    std::memcpy(next, piece.iov_base, piece.iov_len);
    next += piece.iov_len;
  }
  buffer.bytes = run.packet_bytes;
  buffer.to = run.to;
  PeerState& state = peers_[run.to];
  ++state.under_way;
  state.waiting.push_back(&buffer);
  ++waiting_;
}

// Sends the packets that wait for a peer, oldest first.
void FabricDatagrams::send_waiting(PeerState& state) {
  while (!state.waiting.empty()) {
    SendBuffer& buffer = *state.waiting.front();
    const auto taken = endpoint_->send(state.address, buffer.data, buffer.bytes, descriptor(), state.send_tag, &buffer);
    if (taken == Endpoint::Taken::later) return;
    state.waiting.pop_front();
    --waiting_;
    if (taken == Endpoint::Taken::yes) continue;
    release(buffer);
    note_loss(endpoint_->why());
  }
}

void FabricDatagrams::release(SendBuffer& buffer) {
  --peers_[buffer.to].under_way;
  free_.push_back(&buffer);
}

bool FabricDatagrams::receive(const Take& take) {
  ++counters_.receive_calls;
  bool found_any = false;
  trains_.clear();
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t found = endpoint_->poll(batch_);
    for (std::size_t i = 0; i < found; ++i) {
      switch (batch_[i].kind) {
        case Completion::Kind::sent:
          release(static_cast<SendBuffer&>(*batch_[i].work));
          failed_sends_ = 0;
          break;
        case Completion::Kind::received:
          handle_received(batch_[i]);
          break;
        case Completion::Kind::failed:
          handle_failure(batch_[i]);
          break;
        case Completion::Kind::landed:  // no peer was granted memory
          break;
      }
    }
    found_any |= found > 0;
    if (found < batch_.size()) break;
  }
  if (!trains_.empty()) take(trains_);
  for (ReceiveBuffer* buffer : read_) post(*buffer);
  read_.clear();
  const auto refused = std::exchange(unposted_, {});
  for (ReceiveBuffer* buffer : refused) post(*buffer);
  if (waiting_ > 0) {
    for (PeerState& state : peers_) send_waiting(state);
  }
  poll_interval_ns_ = found_any ? kFirstIntervalNs : std::min(2 * poll_interval_ns_, kLastIntervalNs);
  return found_any;
}

void FabricDatagrams::handle_received(const Completion& completion) {
  auto& buffer = static_cast<ReceiveBuffer&>(*completion.work);
  ++counters_.received_datagrams;
  const auto found = by_tag_.find(completion.tag);
  // A peer that is not connected counts as unknown.
  const bool is_known = found != by_tag_.end() && peers_[found->second].is_connected;
  if (is_known && !std::exchange(peers_[found->second].has_sent, true)) --silent_peers_;
  trains_.push_back({.bytes = {buffer.data, completion.bytes},
                     .packet_bytes = completion.bytes,
                     .source = is_known ? found->second : kUnknownPeer});
  read_.push_back(&buffer);
}

void FabricDatagrams::post(ReceiveBuffer& buffer) {
  switch (endpoint_->receive(buffer.data, packet_bytes_, descriptor(), &buffer)) {
    case Endpoint::Taken::yes:
      return;
    case Endpoint::Taken::later:
      return unposted_.push_back(&buffer);
    case Endpoint::Taken::never:
      path_error_ = provider() + ": buffers cannot be posted: " + endpoint_->why();
  }
}

void FabricDatagrams::handle_failure(const Completion& completion) {
  if (completion.work == nullptr) {
    path_error_ = provider() + ": " + completion.why;
    ++counters_.send_errors;
    counters_.last_send_error = completion.why;
    return;
  }
  const auto* work = completion.work;
  if (work >= &send_buffers_.front() && work <= &send_buffers_.back()) {
    release(static_cast<SendBuffer&>(*completion.work));
    return note_loss(completion.why);
  }
  // A message that was too long. Any peer can send one, so it is no error of the path: return an empty packet.
  trains_.push_back({});
  read_.push_back(static_cast<ReceiveBuffer*>(completion.work));
}

void FabricDatagrams::note_loss(const std::string& why) {
  ++counters_.send_errors;
  counters_.last_send_error = why;
  if (++failed_sends_ >= kMaxFailures) path_error_ = provider() + ": sending failed: " + why;
}

FabricDatagrams::WaitHint FabricDatagrams::wait_hint(bool /*wants_room*/) {
  WaitHint hint{.fd = endpoint_->wait_fd(), .events = POLLIN};
  const bool is_sending = free_.size() < send_buffers_.size();
  if (!endpoint_->may_sleep()) {
    hint.poll_after_ns = 0;
  } else if (waiting_ > 0 || !unposted_.empty() || hint.fd < 0) {
    hint.poll_after_ns = kPollIntervalNs;  // a refused call may succeed without a completion before it
  } else if (is_sending || silent_peers_ > 0) {
    hint.poll_after_ns = poll_interval_ns_;
  }
  return hint;
}

}  // namespace netfold::transport::fabric
