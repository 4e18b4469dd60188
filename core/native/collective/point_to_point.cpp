#include <netfold/collective/point_to_point.hpp>
#include <netfold/transport/shm/shm_pipe.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

using Type = FrameHeader::Type;

constexpr std::size_t kMaxReasonBytes = 1024;
// A sender need not wait for a busy rank: all eager messages within its credit fit in the ring.
static_assert(PointToPoint::kCreditBytes <= transport::ShmNode::kRingBytes);
static_assert(sizeof(FrameHeader) <= PointToPoint::kMessageBytes);

std::size_t cost(const FrameHeader& header) { return header.bytes + PointToPoint::kMessageBytes; }

std::string size_text(std::uint64_t bytes, Element element) {
  return std::to_string(bytes) + " bytes of " + name(element);
}

}  // namespace

PointToPoint::PointToPoint(std::unique_ptr<transport::Mesh> lane)
    : lane_(std::move(lane)), peers_(static_cast<std::size_t>(lane_->size())), in_memory_(peers_.size()) {}

void PointToPoint::share(transport::ShmNode& node) {
  node_ = &node;
  std::vector<int> positions(peers_.size(), -1);
  for (int position = 0; position < node.size(); ++position) {
    if (position == node.self()) continue;
    const auto rank = static_cast<std::size_t>(node.rank(position));
    positions[rank] = position;
    in_memory_[rank] = true;
  }
  lane_->wrap([&node, positions = std::move(positions)](
                  int rank, std::unique_ptr<transport::Pipe> pipe) -> std::unique_ptr<transport::Pipe> {
    const int position = positions[static_cast<std::size_t>(rank)];
    if (position < 0) return pipe;
    return std::make_unique<transport::ShmPipe>(node, position, std::move(pipe));
  });
}

PointToPoint::Peer& PointToPoint::at(int peer) {
  auto& state = peers_[static_cast<std::size_t>(peer)];
  if (state == nullptr) state = std::make_unique<Peer>();
  if (!std::exchange(state->is_busy, true)) busy_.push_back(peer);
  return *state;
}

// --- this rank's calls -----------------------------------------------------------------------------------------------

void PointToPoint::post(Ticket ticket, const Call& call) {
  if (call.kind == Kind::send) return post_send(ticket, call);
  post_receive(ticket, call);
}

void PointToPoint::post_send(Ticket ticket, const Call& call) {
  Peer& peer = at(call.root);
  ++peer.outstanding;
  Send send{.ticket = ticket, .header = {}, .data = call.inputs[0].data};
  send.gpu = call.gpu;
  send.header.element = call.element();
  send.header.tag = call.tag;
  send.header.id = ticket;
  send.header.bytes = call.inputs[0].bytes;
  if (call.gpu != nullptr && send.header.bytes > 0) {
    send.header.gpu_chunk_bytes = static_cast<std::uint32_t>(gpu_chunk_bytes(call.root));
    if (send.header.gpu_chunk_bytes == 0) return fail_for_gpu(call.root, ticket, "sends from");
  }
  // Returned credit may be unread.
  if (is_eager(send.header) && peer.credit < cost(send.header)) read(call.root);
  if (!peer.held.empty() || !launch(call.root, send)) peer.held.push_back(send);
}

bool PointToPoint::launch(int to, const Send& send) {
  Peer& peer = at(to);
  FrameHeader header = send.header;
  if (is_eager(header) && peer.credit >= cost(header)) {
    peer.credit -= cost(header);
    peer.frames.push_back({header, send.data, header.bytes, send.ticket, sizeof header + header.bytes});
    return true;
  }
  if (peer.announced.size() >= kMaxAnnounced) return false;
  header.type = Type::announce;
  peer.frames.push_back({header});
  peer.announced.emplace(header.id, send);
  return true;
}

void PointToPoint::launch_held(int to) {
  Peer& peer = at(to);
  while (!peer.held.empty() && launch(to, peer.held.front())) peer.held.pop_front();
}

void PointToPoint::post_receive(Ticket ticket, const Call& call) {
  Receive receive{.ticket = ticket,
                  .source = call.root,
                  .tag = call.tag,
                  .element = call.element(),
                  .accepts_less = call.accepts_less,
                  .data = call.outputs[0].data,
                  .bytes = call.outputs[0].bytes};
  receive.gpu = call.gpu;
  if (const auto source = matcher_.source_of_kept(call.root, call.tag)) {
    ++at(*source).outstanding;
    receive_kept(*source, matcher_.kept(*source, call.tag), std::move(receive));
    return matcher_.drop_kept(*source, call.tag);
  }
  if (call.root != kAnySource) {
    ++at(call.root).outstanding;
  } else if (readable_peers_ == nullptr) {
    readable_peers_ = std::make_unique<transport::ReadablePeers>(*lane_, node_);
  } else if (!matcher_.has_any_source()) {
    readable_peers_->begin_wait();
  }
  matcher_.post(std::move(receive));
}

bool PointToPoint::withdraw(Ticket ticket, const Call& call) {
  if (!matcher_.withdraw(call.root, call.tag, ticket)) return false;
  --at(call.root).outstanding;
  return true;
}

void PointToPoint::receive_kept(int source, Message& message, Receive receive) {
  Peer& peer = at(source);
  if (message.header.type == Type::announce) {
    --peer.kept_announced;
    return accept(source, message.header, std::move(receive));
  }
  if (!fits(source, message.header, receive) || !may_copy(source, message.header, receive)) return;
  peer.kept_bytes -= cost(message.header);
  Input& input = peer.input;
  const bool is_arriving = input.message == &message;
  const std::size_t received = message.values.size() - (is_arriving ? input.left : 0);
  if (received > 0) std::memcpy(receive.data, message.values.data(), received);
  if (is_arriving) {
    input.message = nullptr;
    input.into = receive.data + received;
    input.receive = std::move(receive);
    return;
  }
  finish(source, receive.ticket, message.header.bytes, 0);
  return_credit(source, cost(message.header));
}

std::string PointToPoint::awaited(const Call& call) const {
  std::string text = call.root == kAnySource ? "any rank" : "rank " + std::to_string(call.root);
  text += call.kind == Kind::send ? " to receive" : " to send";
  text += " with tag " + std::to_string(call.tag);
  if (call.kind == Kind::send) return text;
  const std::string kept = matcher_.similar_kept(call.root, call.tag);
  return kept.empty() ? text : text + "; what came is from " + kept;
}

// --- frames from peers -----------------------------------------------------------------------------------------------

std::optional<PointToPoint::Receive> PointToPoint::match(int source, int tag) {
  auto receive = matcher_.take_posted(source, tag);
  if (receive && receive->source == kAnySource) ++at(source).outstanding;
  return receive;
}

bool PointToPoint::fits(int source, const FrameHeader& header, const Receive& receive) {
  const bool has_place = receive.accepts_less ? header.bytes <= receive.bytes : header.bytes == receive.bytes;
  if (has_place && header.element == receive.element) return true;
  const std::string tag = " with tag " + std::to_string(header.tag);
  fault_ = {receive.ticket,
            {Failure::Kind::mismatch, source,
             "rank " + std::to_string(source) + " sent " + size_text(header.bytes, header.element) + tag + ", rank " +
                 std::to_string(lane_->rank()) + " receives " + size_text(receive.bytes, receive.element) + tag +
                 "; a message and the tensor that receives it must have the same size and dtype"}};
  return false;
}

std::size_t PointToPoint::gpu_chunk_bytes(int peer) const { return std::min(kChunkBytes, lane_->gpu_part_bytes(peer)); }

void PointToPoint::fail_for_gpu(int peer, Ticket ticket, const std::string& what) {
  fault_ = {ticket,
            {Failure::Kind::system, peer,
             "rank " + std::to_string(lane_->rank()) + " " + what + " memory of a GPU, and the connection to rank " +
                 std::to_string(peer) +
                 " cannot carry that; every rank needs the same libfabric, provider and NETFOLD_NCCL_CUDA"}};
}

// Whether the CPU may write the message's bytes to their place.
bool PointToPoint::may_copy(int source, const FrameHeader& header, const Receive& receive) {
  if (receive.gpu == nullptr || header.bytes == 0) return true;
  fail_for_gpu(source, receive.ticket, "receives bytes that were not announced into");
  return false;
}

void PointToPoint::accept(int source, const FrameHeader& header, Receive receive) {
  if (!fits(source, header, receive)) return;
  if (at(source).accepted.contains(header.id)) return broken(source, "two messages of one id");
  receive.bytes = header.bytes;
  receive.chunk_bytes = kChunkBytes;
  FrameHeader answer;
  answer.type = Type::accept;
  answer.id = header.id;
  receive.must_use_rma = header.bytes > 0 && (header.gpu_chunk_bytes > 0 || receive.gpu != nullptr);
  if (receive.must_use_rma) {
    receive.chunk_bytes = gpu_chunk_bytes(source);
    if (receive.chunk_bytes == 0) return fail_for_gpu(source, receive.ticket, "receives from or into");
    if (header.gpu_chunk_bytes > 0) {
      receive.chunk_bytes = std::min<std::size_t>(receive.chunk_bytes, header.gpu_chunk_bytes);
    }
    answer.gpu_chunk_bytes = static_cast<std::uint32_t>(receive.chunk_bytes);
  }
  at(source).frames.push_back({answer});
  if (receive.gpu != nullptr) {
    // Its owner has registered it.
  } else if (receive.must_use_rma) {
    receive.lease = lane_->lease(receive.data, receive.bytes);
  } else if (lane_->uses_rma(source, std::min<std::size_t>(receive.bytes, kChunkBytes))) {
    receive.lease = lane_->lease(receive.data, receive.bytes);
  }
  at(source).accepted.emplace(header.id, std::move(receive));
  post_chunks(source);
}

void PointToPoint::handle(int from, const FrameHeader& header) {
  Peer& peer = at(from);
  if (header.magic != FrameHeader::kMagic) return broken(from, "bytes that are no frame");
  Input& input = peer.input;
  input.header = header;
  input.is_in_gpu = false;
  switch (header.type) {
    case Type::eager: {
      if (header.bytes > kEagerBytes) {
        return broken(from, "an eager message of " + std::to_string(header.bytes) + " bytes, above the limit of " +
                                std::to_string(kEagerBytes));
      }
      input.left = header.bytes;
      if (auto receive = match(from, header.tag)) {
        if (!fits(from, header, *receive) || !may_copy(from, header, *receive)) return;
        input.into = receive->data;
        input.receive = std::move(receive);
        return;
      }
      peer.kept_bytes += cost(header);
      if (peer.kept_bytes > kCreditBytes) return broken(from, "eager messages beyond its credit");
      input.message = &matcher_.keep(from, header, header.bytes);
      input.into = input.message->values.data();
      return;
    }
    case Type::announce:
      if (auto receive = match(from, header.tag)) return accept(from, header, std::move(*receive));
      if (++peer.kept_announced > kMaxAnnounced) return broken(from, "too many announcements");
      matcher_.keep(from, header, 0);
      return;
    case Type::accept: {
      const auto found = peer.announced.find(header.id);
      if (found == peer.announced.end()) return broken(from, "an accept of a message that was not announced");
      const Send& announced = found->second;
      const bool must_use_rma = header.gpu_chunk_bytes > 0 && announced.header.bytes > 0;
      if (must_use_rma && header.gpu_chunk_bytes > gpu_chunk_bytes(from)) {
        return fail_for_gpu(from, announced.ticket, "sends from or to");
      }
      if (announced.header.gpu_chunk_bytes > 0 && !must_use_rma) {
        return broken(from, "an accept of " + std::to_string(announced.header.bytes) +
                                " bytes that does not allow for memory of a GPU");
      }
      // From here on the message's bytes are sent.
      Send& send = peer.streaming.emplace_back(announced);
      send.chunk_bytes = must_use_rma ? header.gpu_chunk_bytes : kChunkBytes;
      send.must_use_rma = must_use_rma;
      if (send.gpu == nullptr &&
          (send.must_use_rma || lane_->uses_rma(from, std::min<std::size_t>(send.header.bytes, kChunkBytes)))) {
        // The pipe only reads from it.
        send.lease = lane_->lease(const_cast<std::byte*>(send.data), send.header.bytes);
      }
      peer.announced.erase(found);
      return launch_held(from);
    }
    case Type::chunk: {
      const auto found = peer.accepted.find(header.id);
      if (found == peer.accepted.end() || header.bytes > found->second.bytes - found->second.received) {
        return broken(from, "values of a message that was not accepted");
      }
      input.left = header.bytes;
      input.into = found->second.data + found->second.received;
      input.is_in_gpu = found->second.gpu != nullptr;
      return;
    }
    case Type::credit:
      if (header.bytes > kCreditBytes - peer.credit) return broken(from, "more credit than this rank had used");
      peer.credit += header.bytes;
      return launch_held(from);
    case Type::abort:
      if (header.bytes > kMaxReasonBytes) return broken(from, "a reason for an abort that is too long");
      input.left = header.bytes;
      input.reason.resize(header.bytes);
      input.into = reinterpret_cast<std::byte*>(input.reason.data());
      return;
  }
  broken(from, "a frame of an unknown type");
}

void PointToPoint::finish_input(int from) {
  Peer& peer = at(from);
  Input& input = peer.input;
  const FrameHeader& header = input.header;
  if (header.type == Type::eager) {
    if (input.receive) {
      finish(from, input.receive->ticket, header.bytes, 0);
      return_credit(from, cost(header));
    }
    input.receive.reset();
    input.message = nullptr;
  } else if (header.type == Type::chunk) {
    const auto found = peer.accepted.find(header.id);
    found->second.received += header.bytes;
    if (found->second.received < found->second.bytes) return;
    finish(from, found->second.ticket, found->second.bytes, sizeof header, found->second.lease);
    peer.accepted.erase(found);
  } else if (header.type == Type::abort) {
    const bool blames_us = header.tag == lane_->rank();
    const bool is_mismatch = blames_us && header.failure == static_cast<std::uint8_t>(Failure::Kind::mismatch);
    Failure failure;
    failure.kind = is_mismatch ? Failure::Kind::mismatch : Failure::Kind::peer_lost;
    failure.rank = header.tag >= 0 && !blames_us ? header.tag : from;
    failure.text =
        "rank " + std::to_string(from) + (header.orderly != 0 ? " left: " : " gave up on the group: ") + input.reason;
    failure.remote_reason = input.reason;
    failure.orderly = header.orderly != 0;
    lose(from, std::move(failure));
  }
}

void PointToPoint::return_credit(int to, std::size_t bytes) {
  Peer& peer = at(to);
  peer.credit_owed += bytes;
  // In large amounts, so that most exchanges need no frame for credit.
  if (peer.credit_owed < kCreditBytes / 2) return;
  FrameHeader header;
  header.type = Type::credit;
  header.bytes = std::exchange(peer.credit_owed, 0);
  peer.frames.push_back({header});
}

void PointToPoint::finish(int peer, Ticket ticket, std::size_t received, std::uint64_t wire_bytes, const Lease& lease) {
  --at(peer).outstanding;
  Done done{.ticket = ticket, .peer = peer, .received = received, .wire_bytes = wire_bytes, .registrations = {}};
  if (lease != nullptr) done.registrations = {lease->hits, lease->misses};
  done_.push_back(done);
}

void PointToPoint::broken(int peer, const std::string& what) {
  fault_ = {any_ticket(peer),
            {Failure::Kind::system, peer,
             "rank " + std::to_string(peer) + " broke the point-to-point protocol: it sent " + what}};
}

void PointToPoint::abort(const Failure& failure) {
  const std::string& reason = failure.remote_reason.empty() ? failure.text : failure.remote_reason;
  FrameHeader header;
  header.type = Type::abort;
  header.failure = static_cast<std::uint8_t>(failure.kind);
  header.orderly = failure.orderly ? 1 : 0;
  header.tag = failure.rank;
  header.bytes = std::min(reason.size(), kMaxReasonBytes);
  const iovec parts[2] = {{&header, sizeof header},
                          {const_cast<char*>(reason.data()), static_cast<std::size_t>(header.bytes)}};
  for (int rank = 0; rank < lane_->size(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (!in_memory_[index] && !lane_->was_connected(rank)) continue;
    const Peer* peer = peers_[index].get();
    if (peer == nullptr || (!peer->failure && peer->written == 0)) lane_->send_last(rank, parts);
  }
}

void PointToPoint::release_memory() {
  if (!fault_) fault_ = {0, {Failure::Kind::aborted, -1, "this rank gave up its calls"}};
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    peer->frames.clear();
    peer->writing.reset();  // `written` stays: the place in the stream
    peer->in_flight.clear();
    peer->held.clear();
    peer->announced.clear();
    peer->streaming.clear();
    peer->input = {};
    peer->accepted.clear();
  }
  matcher_ = {};
}

bool PointToPoint::has_left(int rank) {
  if (!at(rank).failure) read(rank);
  return static_cast<bool>(at(rank).failure);
}

}  // namespace netfold::collective
