#include <netfold/collective/direct.hpp>
#include <netfold/collective/in_network.hpp>
#include <netfold/kernels/convert.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace netfold::collective {
namespace {

// Each packet is header, values, padding: three pieces, so that a run of packets is uniform.
constexpr std::size_t kPieces = 3;

std::string text(const protocol::Header& header) {
  return "operation #" + std::to_string(header.operation) + " of " + std::to_string(header.elements) + " elements (" +
         kernels::name(static_cast<kernels::ReduceOp>(header.reduce)) + ", wire " +
         kernels::name(static_cast<kernels::DType>(header.wire)) + ", choice table " + std::to_string(header.table) +
         ")";
}

}  // namespace

Channel::Channel(const protocol::WorkerConfig& config, std::vector<int> ranks,
                 std::unique_ptr<transport::UdpSocket> socket, const transport::Address& to)
    : machine_(config), ranks_(std::move(ranks)), socket_(std::move(socket)), to_(to) {
  headers_.resize(kBatchPackets * protocol::kHeaderBytes);
  staging_.resize(kBatchPackets * config.payload_bytes);
  zeros_.resize(config.payload_bytes);
  kept_ = std::make_unique<std::byte[]>(config.window * machine_.packet_bytes());
  pieces_.resize(kBatchPackets * kPieces);
  chunks_.resize(kBatchPackets);
  owners_.resize(kBatchPackets);
  again_.resize(kBatchPackets);
}

bool Channel::can_start() const {
  return machine_.can_start() &&
         std::any_of(active_.begin(), active_.end(), [](const Active& active) { return active.call == nullptr; });
}

int Channel::start(const Call& call) {
  const std::uint64_t first_chunk = machine_.line_end();
  machine_.start({.operation = call.sequence,
                  .elements = call.elements(),
                  .wire = call.wire,
                  .reduce = call.reduce,
                  .table = call.table});
  for (std::size_t token = 0; token < active_.size(); ++token) {
    if (active_[token].call == nullptr) {
      active_[token].call = &call;
      active_[token].first_chunk = first_chunk;
      return static_cast<int>(token);
    }
  }
  std::abort();  // excluded by can_start()
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
    moved = receive(now_ns);
    machine_.handle_timeout(now_ns);
    if (!failure_) moved |= send(now_ns);
  } catch (const std::system_error& error) {
    failure_ = {Failure::Kind::system, -1,
                std::string("the switch's port cannot be used: ") + error.what() +
                    (error.code().value() == EMSGSIZE ? "; the path's MTU shrank below what was probed when joining"
                                                      : "; a local firewall may refuse it")};
  }
  polled_ = failure_ ? Progress::failed : moved ? Progress::moved : Progress::idle;
  return polled_;
}

bool Channel::receive(std::int64_t now_ns) {
  return socket_->receive([&](std::span<const std::byte> bytes, const transport::Address& source) {
    take(bytes, source, now_ns);
  }) > 0;
}

void Channel::take(std::span<const std::byte> bytes, const transport::Address& source, std::int64_t now_ns) {
  if (!(source == to_)) {
    ++drops_[static_cast<std::size_t>(protocol::Drop::source)];
    return;
  }
  accept(bytes, now_ns);
}

bool Channel::accept(std::span<const std::byte> bytes, std::int64_t now_ns) {
  const auto received = machine_.handle_packet(bytes, now_ns);
  switch (received.outcome) {
    case protocol::Worker::Outcome::dropped:
      ++drops_[static_cast<std::size_t>(received.drop)];
      return false;
    case protocol::Worker::Outcome::mismatch:
      failure_ = {Failure::Kind::mismatch, rank_of(received.header.worker),
                  "rank " + std::to_string(rank_of(received.header.worker)) + " is in " + text(received.header) +
                      ", which does not match what this rank " + std::to_string(rank_of(machine_.config().worker)) +
                      " called at the same place; every rank must make the same calls in the same order with the "
                      "same sizes and dtypes"};
      return false;
    case protocol::Worker::Outcome::notice:
      return false;
    case protocol::Worker::Outcome::received:
      break;
  }
  std::memcpy(kept_at(received.header.chunk), bytes.data(), bytes.size());
  Active* active = find(received.header.operation);
  if (active == nullptr) return true;  // its owner gave it up
  const Call& call = *active->call;
  std::byte* into = call.outputs[0].data + received.first * kernels::element_bytes(call.dtype);
  kernels::convert(call.dtype, into, call.wire, received.values.data(), received.header.count);
  active->last_rank = rank_of(received.header.worker);
  if (received.finished) active->finished = true;
  return true;
}

std::uint64_t Channel::life() const {
  return static_cast<std::uint64_t>(machine_.config().incarnation) << 32 | machine_.config().epoch;
}

std::byte* Channel::kept_at(std::uint64_t chunk) const {
  return kept_.get() + chunk % machine_.config().window * machine_.packet_bytes();
}

std::span<const std::byte> Channel::kept(std::uint64_t chunk) const {
  const std::span<const std::byte> packet(kept_at(chunk), machine_.packet_bytes());
  const auto view = protocol::PacketView::parse(packet);  // of a place that nothing has come to yet: none
  if (!view || view->header().chunk != chunk) return {};
  return packet;
}

Channel::Words Channel::words() const {
  const std::uint32_t window = machine_.config().window;
  Words words{.base = machine_.oldest_unanswered(), .end = machine_.line_end(), .held = {}};
  words.held.resize((window + 7) / 8);
  for (std::uint32_t i = 0; i < window; ++i) {
    if (machine_.is_answered(words.base + i)) words.held[i / 8] |= std::byte{1} << (i % 8);
  }
  return words;
}

std::vector<Range> Channel::missing(int token) const {
  const Active& active = active_[static_cast<std::size_t>(token)];
  const std::size_t elements = active.call->elements();
  const std::size_t per_chunk = machine_.config().payload_bytes / kernels::element_bytes(active.call->wire);
  std::vector<Range> ranges;
  std::uint64_t chunk = active.first_chunk;
  for (std::size_t first = 0; first < elements; first += per_chunk, ++chunk) {
    if (machine_.is_answered(chunk)) continue;
    const std::size_t count = std::min(per_chunk, elements - first);
    if (!ranges.empty() && ranges.back().first + ranges.back().count == first) {
      ranges.back().count += count;
    } else {
      ranges.push_back({first, count});
    }
  }
  return ranges;
}

std::size_t Channel::stage(const protocol::Worker::Send& send, const Call& call, iovec* pieces) {
  const std::size_t index = static_cast<std::size_t>(pieces - pieces_.data()) / kPieces;
  std::byte* header = headers_.data() + index * protocol::kHeaderBytes;
  protocol::write_header(send.header, header);
  std::byte* values = call.outputs[0].data + send.first * kernels::element_bytes(call.dtype);
  if (call.wire != call.dtype) {
    std::byte* staged = staging_.data() + index * machine_.config().payload_bytes;
    kernels::convert(call.wire, staged, call.dtype, values, send.count);
    values = staged;
  }
  const std::size_t value_bytes = send.count * kernels::element_bytes(call.wire);
  pieces[0] = {header, protocol::kHeaderBytes};
  pieces[1] = {values, value_bytes};
  pieces[2] = {zeros_.data(), machine_.config().payload_bytes - value_bytes};
  return machine_.packet_bytes();
}

bool Channel::send(std::int64_t now_ns) {
  bool moved = false;
  blocked_ = false;
  for (;;) {
    std::size_t count = 0;
    while (count < kBatchPackets) {
      const auto send = machine_.poll_send(now_ns);
      if (!send) break;
      Active* active = find(send->header.operation);
      if (active == nullptr) continue;  // given up: the group is failing
      stage(*send, *active->call, pieces_.data() + count * kPieces);
      chunks_[count] = send->header.chunk;
      owners_[count] = active;
      again_[count] = send->again;
      ++count;
    }
    if (count == 0) return moved;
    const transport::UdpSocket::Run run{.to = &to_,
                                        .pieces = {pieces_.data(), count * kPieces},
                                        .pieces_per_packet = kPieces,
                                        .packet_bytes = machine_.packet_bytes()};
    const std::size_t sent = socket_->send({&run, 1});
    for (std::size_t i = 0; i < sent; ++i) {
      owners_[i]->wire_bytes += machine_.packet_bytes();
      owners_[i]->retransmissions += again_[i] ? 1 : 0;
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
  set.add(socket_->fd(), static_cast<short>(POLLIN | (blocked_ ? POLLOUT : 0)));
  set.wake_at(machine_.poll_timeout());
}

InNetwork::InNetwork(const Call& call, Channel& channel, int ranks)
    : call_(call), channel_(channel), ranks_(ranks), token_(channel.start(call)) {}

InNetwork::~InNetwork() { channel_.release(token_); }

Progress InNetwork::poll(std::int64_t now_ns) {
  const Progress progress = channel_.poll(now_ns);
  wire_bytes_ = channel_.wire_bytes(token_);
  retransmissions_ = channel_.retransmissions(token_);
  slowest_rank_ = channel_.last_rank(token_);
  if (channel_.finished(token_)) {
    if (call_.average) divide(call_.dtype, call_.outputs[0], ranks_);
    return Progress::done;
  }
  return progress == Progress::failed ? fail(channel_.failure()) : progress;
}

}  // namespace netfold::collective
