#include <netfold/collective/call_signature.hpp>
#include <netfold/collective/channel.hpp>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace netfold::collective {
namespace {

// Each packet consists of header, values, padding and MAC: four parts, so that a run of packets is uniform. The last
// two may be empty.
constexpr std::size_t kParts = 4;

// A call in a group whose choice table is `table`: "broadcast #12 of 100 f32 (root 2), wire u32".
std::string text(const protocol::CallDescriptor& call, std::uint16_t table) {
  const auto signature = CallSignature::unpacked(call.table ^ table);
  const std::string wire = std::string(", wire ") + kernels::name(static_cast<kernels::DType>(call.wire));
  if (!signature) return "operation #" + std::to_string(call.operation) + wire + ", with another choice table";
  return signature->text(call.operation, call.elements, static_cast<kernels::ReduceOp>(call.reduce)) + wire;
}

}  // namespace

Channel::Channel(std::uint64_t generation, const protocol::WorkerConfig& config, const std::optional<ChannelKeys>& keys,
                 std::vector<int> ranks, int rank, std::unique_ptr<transport::Datagrams> port,
                 transport::Datagrams::Peer to)
    : generation_(generation),
      machine_(config),
      mac_bytes_(keys ? auth::kMacBytes : 0),
      ranks_(std::move(ranks)),
      rank_(rank),
      port_(std::move(port)),
      to_(to) {
  if (keys) {
    authenticator_.emplace(keys->contributions, keys->security);
    result_authenticator_.emplace(keys->results, keys->security);
    if (authenticator_->encrypts()) {
      encrypted_.resize(kBatchPackets * config.payload_bytes);
      plain_.resize(machine_.packet_bytes());
    }
  }
  headers_.resize(kBatchPackets * protocol::kHeaderBytes);
  staging_.resize(kBatchPackets * config.payload_bytes);
  zeros_.resize(config.payload_bytes);
  macs_.resize(kBatchPackets * mac_bytes_);
  kept_ = std::make_unique<std::byte[]>(machine_.window_slots() * machine_.packet_bytes());
  parts_.resize(kBatchPackets * kParts);
  chunks_.resize(kBatchPackets);
  owners_.resize(kBatchPackets);
  again_.resize(kBatchPackets);
}

bool Channel::can_start() const {
  return machine_.can_start() && std::ranges::find(active_, nullptr, &Active::call) != active_.end();
}

int Channel::start(const Call& call, const ContributionMap& map) {
  table_ = call.table;
  const std::uint64_t first_chunk = machine_.next_operation_chunk();
  machine_.start({.operation = call.sequence,
                  .elements = map.elements(),
                  .wire = map.wire(),
                  .reduce = map.reduce(),
                  .table = static_cast<std::uint16_t>(call.table ^ CallSignature::of(call).packed()),
                  .size_digest = map.size_digest()});
  const auto free = std::ranges::find(active_, nullptr, &Active::call);
  if (free == active_.end()) std::abort();  // excluded by can_start()
  *free = {.call = &call, .map = &map, .first_chunk = first_chunk};
  return static_cast<int>(free - active_.begin());
}

Channel::Active* Channel::find(std::uint32_t operation) {
  for (Active& active : active_) {
    if (active.call != nullptr && active.call->sequence == operation) return &active;
  }
  return nullptr;
}

Progress Channel::poll(std::int64_t now_ns) {
  if (frozen_) return Progress::idle;
  if (now_ns == polled_ns_) return polled_;
  polled_ns_ = now_ns;
  bool moved = false;
  try {
    // Results may arrive before the port has released their contributions. A full port is therefore read although no
    // result is awaited.
    if (machine_.awaits_results() || port_->room(to_) == 0) moved = receive(now_ns);
    machine_.handle_timeout(now_ns);
    if (!failure_) moved |= send(now_ns);
  } catch (const std::system_error& error) {
    failure_ = {Failure::Kind::system, -1, std::string("the switch's port cannot be used: ") + error.what()};
  }
  polled_ = failure_ ? Progress::failed : moved ? Progress::moved : Progress::idle;
  return polled_;
}

bool Channel::receive(std::int64_t now_ns) {
  return port_->receive([&](std::span<const transport::Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      transport::for_each_packet(train, [&](std::span<const std::byte> bytes) {
        if (train.source == to_) return take(bytes, now_ns);
        ++drops_[static_cast<std::size_t>(protocol::Drop::source)];
      });
    }
  });
}

void Channel::take(std::span<const std::byte> bytes, std::int64_t now_ns) {
  if (result_authenticator_) {
    bytes = opened(bytes);
    if (bytes.empty()) {
      ++drops_[static_cast<std::size_t>(protocol::Drop::unauthenticated)];
      return;
    }
  }
  accept(bytes, now_ns);
}

std::span<const std::byte> Channel::opened(std::span<const std::byte> bytes) {
  if (bytes.size() < protocol::kHeaderBytes + mac_bytes_) return {};
  const auto nonce = protocol::nonce_of(bytes.data(), bytes.size() - mac_bytes_);
  return result_authenticator_->open(nonce, bytes, protocol::kHeaderBytes, plain_);
}

bool Channel::accept(std::span<const std::byte> bytes, std::int64_t now_ns) {
  const auto received = machine_.handle_packet(bytes, now_ns);
  switch (received.outcome) {
    case protocol::Worker::Outcome::dropped:
      ++drops_[static_cast<std::size_t>(received.drop)];
      return false;
    case protocol::Worker::Outcome::mismatch:
      failure_ = mismatch(received.header);
      return false;
    case protocol::Worker::Outcome::nack:
      return false;
    case protocol::Worker::Outcome::received:
      break;
  }
  // The padding behind the values is not kept.
  const std::size_t value_bytes = protocol::CallDescriptor::of(received.header).value_bytes();
  std::memcpy(kept_at(received.header.chunk), bytes.data(), protocol::kHeaderBytes + value_bytes);
  Active* active = find(received.header.operation);
  if (active == nullptr) return true;  // the operation was given up
  active->map->deliver(received.first, received.header.count, received.values.data());
  active->result_bytes += machine_.packet_bytes() + mac_bytes_;
  active->counts.slowest_rank = rank_of(received.header.worker);
  if (received.finished) active->finished = true;
  return true;
}

bool Channel::accept_kept(std::span<const std::byte> packet, std::int64_t now_ns) {
  const auto view = protocol::PacketView::parse(packet);
  if (!view) return false;
  protocol::Header header = view->header();
  header.job = machine_.config().job;
  header.epoch = machine_.config().epoch;
  header.incarnation = machine_.config().incarnation;
  std::vector<std::byte> ours(packet.begin(), packet.end());
  protocol::write_header(header, ours.data());
  return accept(ours, now_ns);
}

std::byte* Channel::kept_at(std::uint64_t chunk) const {
  return kept_.get() + machine_.index_of(chunk) * machine_.packet_bytes();
}

std::span<const std::byte> Channel::kept(std::uint64_t chunk) const {
  const std::span<const std::byte> packet(kept_at(chunk), machine_.packet_bytes());
  const auto view = protocol::PacketView::parse(packet);  // a slot that was never written holds no packet
  if (!view || view->header().chunk != chunk) return {};
  return packet;
}

Channel::ReceiveState Channel::receive_state() const {
  const std::uint32_t window = machine_.config().window;
  ReceiveState state{.base = machine_.oldest_outstanding(), .end = machine_.next_operation_chunk(), .held = {}};
  state.held.resize((window + 7) / 8);
  for (std::uint32_t i = 0; i < window; ++i) {
    if (machine_.has_result(state.base + i)) state.held[i / 8] |= std::byte{1} << (i % 8);
  }
  return state;
}

std::vector<Range> Channel::missing(int token) const {
  const Active& operation = active(token);
  const std::size_t elements = operation.map->elements();
  const std::size_t per_chunk = machine_.config().payload_bytes / kernels::element_bytes(operation.map->wire());
  std::vector<Range> ranges;
  std::uint64_t chunk = operation.first_chunk;
  for (std::size_t first = 0; first < elements; first += per_chunk, ++chunk) {
    if (machine_.has_result(chunk)) continue;
    const std::size_t count = std::min(per_chunk, elements - first);
    if (!ranges.empty() && ranges.back().first + ranges.back().count == first) {
      ranges.back().count += count;
    } else {
      ranges.push_back({first, count});
    }
  }
  return ranges;
}

Failure Channel::mismatch(const protocol::Header& theirs) const {
  const int rank = rank_of(theirs.worker);
  return {Failure::Kind::mismatch, rank,
          "rank " + std::to_string(rank) + " is in " + text(protocol::CallDescriptor::of(theirs), table_) +
              ", this rank " + std::to_string(rank_) + " in " + text(machine_.descriptor_at(theirs.chunk), table_) +
              "; every rank must make the same calls in the same order with the same sizes and dtypes"};
}

void Channel::stage(const protocol::Worker::Send& send, const ContributionMap& map, iovec* parts) {
  const std::size_t index = static_cast<std::size_t>(parts - parts_.data()) / kParts;
  std::byte* header = headers_.data() + index * protocol::kHeaderBytes;
  protocol::write_header(send.header, header);
  std::byte* staging = staging_.data() + index * machine_.config().payload_bytes;
  const std::byte* values = map.contribution(send.first, send.count, staging, zeros_.data());
  const std::size_t value_bytes = send.count * kernels::element_bytes(map.wire());
  parts[0] = {header, protocol::kHeaderBytes};
  parts[1] = {const_cast<std::byte*>(values), value_bytes};
  parts[2] = {zeros_.data(), machine_.config().payload_bytes - value_bytes};
  std::byte* mac = macs_.data() + index * mac_bytes_;
  if (authenticator_ && authenticator_->encrypts()) {
    std::byte* encrypted = encrypted_.data() + index * machine_.config().payload_bytes;
    authenticator_->encrypt(protocol::nonce_of(header, machine_.packet_bytes()), {header, protocol::kHeaderBytes},
                            {parts + 1, 2}, encrypted, mac);
    parts[1].iov_base = encrypted;
    parts[2].iov_base = encrypted + value_bytes;
  } else if (authenticator_) {
    authenticator_->mac(protocol::nonce_of(header, machine_.packet_bytes()), {parts, kParts - 1}, mac);
  }
  parts[3] = {mac, mac_bytes_};
}

bool Channel::send(std::int64_t now_ns) {
  bool moved = false;
  blocked_ = false;
  for (;;) {
    std::size_t count = 0;
    const std::size_t most = std::min(kBatchPackets, port_->room(to_));
    blocked_ = most == 0;
    while (count < most) {
      const auto send = machine_.poll_send(now_ns);
      if (!send) break;
      Active* active = find(send->header.operation);
      if (active == nullptr) continue;  // the operation was given up: the group is failing
      stage(*send, *active->map, parts_.data() + count * kParts);
      chunks_[count] = send->header.chunk;
      owners_[count] = active;
      again_[count] = send->again;
      ++count;
    }
    if (count == 0) return moved;
    const std::size_t packet_bytes = machine_.packet_bytes() + mac_bytes_;
    transport::Datagrams::Run run{.to = to_,
                                  .pieces = {parts_.data(), count * kParts},
                                  .pieces_per_packet = kParts,
                                  .packet_bytes = packet_bytes};
    const std::size_t sent = port_->send({&run, 1});
    for (std::size_t i = 0; i < sent; ++i) {
      owners_[i]->counts.wire_bytes += packet_bytes;
      owners_[i]->counts.retransmissions += again_[i] ? 1 : 0;
    }
    for (std::size_t i = sent; i < count; ++i) machine_.not_sent(chunks_[i]);
    moved |= sent > 0;
    if (sent < count) {
      blocked_ = true;
      return moved;
    }
  }
}

void Channel::wait_for(WaitSet& set) const {
  if (frozen_) return;
  const transport::Datagrams::WaitHint hint = port_->wait_hint(blocked_);
  if (hint.fd >= 0) set.add(hint.fd, hint.events);
  if (hint.poll_after_ns >= 0) set.wake_at(polled_ns_ + hint.poll_after_ns);
  set.wake_at(machine_.poll_timeout());
  if (!blocked_) set.wake_at(machine_.next_send_ns());
}

}  // namespace netfold::collective
