#include <netfold/transport/fabric/fabric_datagrams.hpp>

#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

namespace netfold::transport::fabric {
namespace {

// So many bits cannot be guessed.
constexpr int kLeastTagBits = 48;
// Below a hello and a few values nothing can be said.
constexpr std::size_t kLeastPacketBytes = 640;
constexpr std::size_t kLeastBuffers = 16;
constexpr std::size_t kAlignment = 64;

std::uint64_t random_bits() {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom");
  return bits;
}

}  // namespace

FabricDatagrams::FabricDatagrams(std::unique_ptr<Endpoint> endpoint, std::size_t packet_bytes,
                                 std::size_t in_flight_bytes, std::size_t peers)
    : endpoint_(std::move(endpoint)),
      packet_bytes_(std::min(packet_bytes, endpoint_->limits().message_bytes)),
      peers_(peers),
      unheard_(peers),
      pid_(getpid()) {
  const Endpoint::Limits& limits = endpoint_->limits();
  if (limits.tag_bits < kLeastTagBits || packet_bytes_ < kLeastPacketBytes) {
    throw Error("provider " + limits.provider + " has tags of " + std::to_string(limits.tag_bits) +
                " bits and messages of " + std::to_string(limits.message_bytes) +
                " bytes; packets of an aggregator need " + std::to_string(kLeastTagBits) + " bits and " +
                std::to_string(kLeastPacketBytes) + " bytes");
  }
  const std::size_t stride = (packet_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t wanted = std::max(kLeastBuffers, peers * (in_flight_bytes / packet_bytes_));
  const std::size_t most = kMaxBufferBytes / stride;
  const std::size_t sends = std::min({wanted, most / 3, std::max(limits.sends, kLeastBuffers)});
  const std::size_t receives = std::min({2 * wanted, most - most / 3, std::max(limits.receives, kLeastBuffers)});
  most_under_way_ = std::max<std::size_t>(1, sends / std::max<std::size_t>(1, peers));

  const std::size_t bytes = (sends + receives) * stride;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Error("no memory for packets over a fabric: " + std::to_string(bytes) + " bytes");
  memory_ = {static_cast<std::byte*>(memory), Memory{bytes}};
  if (limits.needs_registration) registration_ = endpoint_->register_memory(memory_.get(), bytes, Access::messages);
  sendings_.resize(sends);
  receivings_.resize(receives);
  std::byte* next = memory_.get();
  for (Sending& sending : sendings_) {
    sending.data = std::exchange(next, next + stride);
    free_.push_back(&sending);
  }
  for (Receiving& receiving : receivings_) {
    receiving.data = std::exchange(next, next + stride);
    post(receiving);
  }
  const std::uint64_t usable = ~std::uint64_t{0} >> (64 - limits.tag_bits);
  for (Peer peer = 0; peer < peers; ++peer) {
    do {
      peers_[peer].tag_in = random_bits() & usable;
    } while (!by_tag_.emplace(peers_[peer].tag_in, peer).second);
  }
}

FabricDatagrams::~FabricDatagrams() {
  if (pid_ == getpid()) return;
  // A child of fork: what the provider shares with its parent is not ours to close.
  static_cast<void>(registration_.release());
  static_cast<void>(endpoint_.release());
}

void FabricDatagrams::Memory::operator()(std::byte* first) const { munmap(first, bytes); }

void FabricDatagrams::connect(Peer peer, std::span<const std::byte> name, std::uint64_t tag) {
  // A provider reads as many bytes as its names have, whatever came.
  if (name.empty() || name.size() > kMaxNameBytes) {
    throw Error("an address of " + std::to_string(name.size()) + " bytes is none of provider " + limits().provider);
  }
  std::vector<std::byte> padded(kMaxNameBytes + 1);
  std::copy(name.begin(), name.end(), padded.begin());
  PeerState& state = peers_[peer];
  state.at = endpoint_->add(padded);
  state.tag_out = tag;
  state.connected = true;
}

std::size_t FabricDatagrams::send(std::span<Run> runs) {
  std::size_t total = 0;
  for (Run& run : runs) {
    // The other end has a say in the length of a job's packets, too.
    if (run.packet_bytes > packet_bytes_) {
      ++counters_.send_errors;
      counters_.last_send_errno = EMSGSIZE;
      counters_.last_send_error = "a packet of " + std::to_string(run.packet_bytes) + " bytes over provider " +
                                  limits().provider + ", where the longest has " + std::to_string(packet_bytes_);
      run.taken = run.pieces.size() / run.pieces_per_packet;
      total += run.taken;
      continue;
    }
    run.taken = std::min(run.pieces.size() / run.pieces_per_packet, room(run.to));
    for (std::size_t number = 0; number < run.taken; ++number) take(run, number);
    push(peers_[run.to]);
    look_ns_ = kFirstLookNs;
    total += run.taken;
  }
  return total;
}

void FabricDatagrams::take(const Run& run, std::size_t number) {
  Sending& sending = *free_.back();
  free_.pop_back();
  std::byte* next = sending.data;
  for (const iovec& piece : run.pieces.subspan(number * run.pieces_per_packet, run.pieces_per_packet)) {
    if (piece.iov_len == 0) continue;
    std::memcpy(next, piece.iov_base, piece.iov_len);
    next += piece.iov_len;
  }
  sending.bytes = run.packet_bytes;
  sending.to = run.to;
  PeerState& state = peers_[run.to];
  ++state.under_way;
  state.waiting.push_back(&sending);
  ++waiting_;
}

// What waits for this peer, oldest first.
void FabricDatagrams::push(PeerState& state) {
  void* descriptor = registration_ == nullptr ? nullptr : registration_->descriptor();
  while (!state.waiting.empty()) {
    Sending& sending = *state.waiting.front();
    const auto taken = endpoint_->send(state.at, sending.data, sending.bytes, descriptor, state.tag_out, &sending);
    if (taken == Endpoint::Taken::later) return;
    state.waiting.pop_front();
    --waiting_;
    if (taken == Endpoint::Taken::yes) continue;
    release(sending);
    lost(endpoint_->why());
  }
}

void FabricDatagrams::release(Sending& sending) {
  --peers_[sending.to].under_way;
  free_.push_back(&sending);
}

bool FabricDatagrams::receive(const Take& take) {
  ++counters_.receive_calls;
  bool moved = false;
  trains_.clear();
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t found = endpoint_->poll(batch_);
    for (std::size_t i = 0; i < found; ++i) {
      const Completion& completion = batch_[i];
      if (completion.kind == Completion::Kind::failed) {
        failed(completion);
      } else if (completion.kind == Completion::Kind::sent) {
        release(static_cast<Sending&>(*completion.work));
        failed_sends_ = 0;
      } else if (completion.kind == Completion::Kind::received) {  // nobody was granted anything to write to
        auto& receiving = static_cast<Receiving&>(*completion.work);
        ++counters_.received_datagrams;
        const auto known = by_tag_.find(completion.tag);
        // Who is not connected yet has not been named.
        const bool is_known = known != by_tag_.end() && peers_[known->second].connected;
        if (is_known && !std::exchange(peers_[known->second].heard, true)) --unheard_;
        trains_.push_back({.bytes = {receiving.data, completion.bytes},
                           .packet_bytes = completion.bytes,
                           .source = is_known ? known->second : kUnknownPeer});
        read_.push_back(&receiving);
      }
    }
    moved |= found > 0;
    if (found < batch_.size()) break;
  }
  if (!trains_.empty()) take(trains_);
  for (Receiving* receiving : read_) post(*receiving);
  read_.clear();
  const auto again = std::exchange(unposted_, {});
  for (Receiving* receiving : again) post(*receiving);
  if (waiting_ > 0) {
    for (PeerState& state : peers_) push(state);
  }
  look_ns_ = moved ? kFirstLookNs : std::min(2 * look_ns_, kLastLookNs);
  return moved;
}

void FabricDatagrams::post(Receiving& receiving) {
  void* descriptor = registration_ == nullptr ? nullptr : registration_->descriptor();
  switch (endpoint_->receive(receiving.data, packet_bytes_, descriptor, &receiving)) {
    case Endpoint::Taken::yes:
      return;
    case Endpoint::Taken::later:
      return unposted_.push_back(&receiving);
    case Endpoint::Taken::never:
      path_error_ = "provider " + limits().provider + ": buffers cannot be posted: " + endpoint_->why();
  }
}

void FabricDatagrams::failed(const Completion& completion) {
  if (completion.work == nullptr) {
    path_error_ = "provider " + limits().provider + ": " + completion.why;
    ++counters_.send_errors;
    counters_.last_send_error = completion.why;
    return;
  }
  const auto* work = completion.work;
  if (work >= &sendings_.front() && work <= &sendings_.back()) {
    release(static_cast<Sending&>(*completion.work));
    return lost(completion.why);
  }
  // A message that was too long, from who does not keep to what was agreed on: anybody may, so it is no trouble.
  trains_.push_back({});
  read_.push_back(static_cast<Receiving*>(completion.work));
}

void FabricDatagrams::lost(const std::string& why) {
  ++counters_.send_errors;
  counters_.last_send_error = why;
  if (++failed_sends_ >= kMaxFailures) path_error_ = "provider " + limits().provider + ": sending failed: " + why;
}

FabricDatagrams::WaitHint FabricDatagrams::wait_hint(bool /*wants_room*/) {
  WaitHint hint{.fd = endpoint_->wait_fd(), .events = POLLIN};
  const bool sends = free_.size() < sendings_.size();
  if (!endpoint_->may_sleep()) {
    hint.poll_after_ns = 0;
  } else if (waiting_ > 0 || !unposted_.empty() || hint.fd < 0) {
    hint.poll_after_ns = kPollIntervalNs;  // what was refused may go without a completion before it
  } else if (sends || unheard_ > 0) {
    hint.poll_after_ns = look_ns_;
  }
  return hint;
}

}  // namespace netfold::transport::fabric
