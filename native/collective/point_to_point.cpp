#include <netfold/collective/message.hpp>
#include <netfold/collective/point_to_point.hpp>
#include <netfold/transport/shm/shm_pipe.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

using Type = FrameHeader::Type;

constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);
constexpr std::size_t kMaxReasonBytes = 1024;
// Read ahead of what is known to come: several small messages in one call; large values go past it.
constexpr std::size_t kStagingBytes = 16 << 10;
// What a sender may leave to a rank that is busy elsewhere lies in the ring; it need not wait.
static_assert(PointToPoint::kCreditBytes <= transport::ShmNode::kRingBytes);
static_assert(kHeaderBytes <= PointToPoint::kMessageBytes);
// System calls a peer and turn, so that no peer keeps the others, or a deadline, waiting.
constexpr int kCallsATurn = 16;

// Of the chunk that begins so many bytes into a message.
std::uint64_t name_of(std::uint64_t message, std::size_t begin) {
  constexpr int kChunkBits = 24;  // 16 TB
  return (message << kChunkBits) + begin / PointToPoint::kChunkBytes;
}

std::size_t cost(const FrameHeader& header) { return header.bytes + PointToPoint::kMessageBytes; }

std::string size_text(std::uint64_t bytes, std::uint8_t dtype) {
  const char* type = dtype < kernels::kDTypeCount ? kernels::name(static_cast<kernels::DType>(dtype)) : "?";
  return std::to_string(bytes) + " bytes of " + type;
}

}  // namespace

PointToPoint::PointToPoint(std::unique_ptr<transport::Mesh> lane)
    : lane_(std::move(lane)), peers_(static_cast<std::size_t>(lane_->size())) {}

void PointToPoint::share(transport::ShmNode& node) {
  for (int position = 0; position < node.size(); ++position) {
    if (position == node.self()) continue;
    const int rank = node.rank(position);
    auto connection = lane_->exchange(rank, nullptr);
    lane_->exchange(rank, std::make_unique<transport::ShmPipe>(node, position, std::move(connection)));
    at(rank).in_memory = true;
  }
}

// --- what this rank asks for -----------------------------------------------------------------------------------------

void PointToPoint::post(Ticket ticket, const Call& call) {
  if (call.kind == Kind::send) return post_send(ticket, call);
  post_receive(ticket, call);
}

void PointToPoint::post_send(Ticket ticket, const Call& call) {
  Peer& peer = at(call.root);
  ++peer.outstanding;
  Send send{.ticket = ticket, .header = {}, .data = call.inputs[0].data};
  send.header.dtype = static_cast<std::uint8_t>(call.dtype);
  send.header.tag = call.tag;
  send.header.id = ticket;
  send.header.bytes = call.inputs[0].bytes;
  if (send.header.bytes <= kEagerBytes && peer.credit < cost(send.header)) read(call.root);  // it may have come back
  if (!peer.held.empty() || !launch(call.root, send)) peer.held.push_back(send);
}

// False: neither credit nor a place among the announced is left.
bool PointToPoint::launch(int to, const Send& send) {
  Peer& peer = at(to);
  FrameHeader header = send.header;
  if (header.bytes <= kEagerBytes && peer.credit >= cost(header)) {
    peer.credit -= cost(header);
    peer.frames.push_back({header, send.data, header.bytes, send.ticket, kHeaderBytes + header.bytes});
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
  Receive receive{.ticket = ticket, .source = call.root, .tag = call.tag};
  receive.dtype = static_cast<std::uint8_t>(call.dtype);
  receive.data = call.outputs[0].data;
  receive.bytes = call.outputs[0].bytes;
  receive.order = ++order_;
  // Of any source: who came first. The tag's messages lie together in the map, ordered by source.
  auto found = kept_.end();
  if (call.root != kAnySource) {
    found = kept_.find({call.tag, call.root});
  } else {
    for (auto it = kept_.lower_bound({call.tag, 0}); it != kept_.end() && it->first.first == call.tag; ++it) {
      if (found == kept_.end() || it->second.front().order < found->second.front().order) found = it;
    }
  }
  if (found == kept_.end()) {
    if (call.root == kAnySource) {
      ++posted_to_any_;
    } else {
      ++at(call.root).outstanding;
    }
    posted_[{call.tag, call.root}].push_back(receive);
    return;
  }
  const int source = found->first.second;
  ++at(source).outstanding;
  take(source, found->second.front(), receive);
  found->second.pop_front();
  if (found->second.empty()) kept_.erase(found);
}

void PointToPoint::take(int source, Message& message, Receive receive) {
  Peer& peer = at(source);
  if (message.header.type == Type::announce) {
    --peer.kept_announced;
    return accept(source, message.header, receive);
  }
  if (!fits(source, message.header, receive)) return;
  peer.kept_bytes -= cost(message.header);
  Input& input = peer.input;
  const bool arriving = input.message == &message;
  const std::size_t got = message.values.size() - (arriving ? input.left : 0);
  if (got > 0) std::memcpy(receive.data, message.values.data(), got);
  if (arriving) {
    input.message = nullptr;
    input.into = receive.data + got;
    input.receive = receive;
    return;
  }
  finish(source, receive.ticket, 0);
  give_back(source, cost(message.header));
}

// --- what the peers say ----------------------------------------------------------------------------------------------

std::optional<PointToPoint::Receive> PointToPoint::match(int source, int tag) {
  const auto named = posted_.find({tag, source});
  const auto any = posted_.find({tag, kAnySource});
  auto found = named;
  if (named == posted_.end() || (any != posted_.end() && any->second.front().order < named->second.front().order)) {
    found = any;
  }
  if (found == posted_.end()) return std::nullopt;
  Receive receive = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  if (receive.source == kAnySource) {
    --posted_to_any_;
    ++at(source).outstanding;
  }
  return receive;
}

bool PointToPoint::fits(int source, const FrameHeader& header, const Receive& receive) {
  if (header.bytes == receive.bytes && header.dtype == receive.dtype) return true;
  const std::string tag = " with tag " + std::to_string(header.tag);
  fault_ = {receive.ticket,
            {Failure::Kind::mismatch, source,
             "rank " + std::to_string(source) + " sent " + size_text(header.bytes, header.dtype) + tag + ", rank " +
                 std::to_string(lane_->rank()) + " receives " + size_text(receive.bytes, receive.dtype) + tag +
                 "; a message and the tensor that receives it must have the same size and dtype"}};
  return false;
}

void PointToPoint::accept(int source, const FrameHeader& header, Receive receive) {
  if (!fits(source, header, receive)) return;
  FrameHeader answer;
  answer.type = Type::accept;
  answer.id = header.id;
  at(source).frames.push_back({answer});
  if (lane_->uses_rma(source, std::min<std::size_t>(receive.bytes, kChunkBytes))) {
    receive.lease = lane_->lease(receive.data, receive.bytes);
  }
  at(source).accepted.emplace(header.id, std::move(receive));
  name_places(source);
}

// Of the values of the messages that were accepted, as many as may be named at once. Those of the last chunk may be too
// few for the direct path.
void PointToPoint::name_places(int source) {
  for (auto& [id, receive] : at(source).accepted) {
    while (receive.placed < receive.bytes) {
      const std::size_t some = std::min(kChunkBytes, receive.bytes - receive.placed);
      if (lane_->uses_rma(source, some) &&
          !lane_->post_receive(source, name_of(id, receive.placed), receive.data + receive.placed, some)) {
        return;
      }
      receive.placed += some;
    }
  }
}

void PointToPoint::handle(int from, const FrameHeader& header) {
  Peer& peer = at(from);
  if (header.magic != FrameHeader::kMagic) return broken(from, "something that is no message");
  Input& input = peer.input;
  input.header = header;
  switch (header.type) {
    case Type::eager: {
      if (header.bytes > kEagerBytes) return broken(from, "an eager message of " + std::to_string(header.bytes));
      input.left = header.bytes;
      if (auto receive = match(from, header.tag)) {
        if (!fits(from, header, *receive)) return;
        input.into = receive->data;
        input.receive = std::move(receive);
        return;
      }
      peer.kept_bytes += cost(header);
      if (peer.kept_bytes > kCreditBytes) return broken(from, "more than its credit");
      auto& queue = kept_[{header.tag, from}];
      queue.push_back({header, std::vector<std::byte>(header.bytes), ++order_});
      input.message = &queue.back();
      input.into = queue.back().values.data();
      return;
    }
    case Type::announce:
      if (auto receive = match(from, header.tag)) return accept(from, header, *receive);
      if (++peer.kept_announced > kMaxAnnounced) return broken(from, "too many announcements");
      kept_[{header.tag, from}].push_back({header, {}, ++order_});
      return;
    case Type::accept: {
      const auto found = peer.announced.find(header.id);
      if (found == peer.announced.end()) return broken(from, "an answer to nothing");
      peer.streaming.push_back(found->second);
      if (lane_->uses_rma(from, std::min<std::size_t>(found->second.header.bytes, kChunkBytes))) {
        // Only read from.
        auto* data = const_cast<std::byte*>(found->second.data);
        peer.streaming.back().lease = lane_->lease(data, found->second.header.bytes);
      }
      peer.announced.erase(found);
      return launch_held(from);
    }
    case Type::chunk: {
      const auto found = peer.accepted.find(header.id);
      if (found == peer.accepted.end() || header.bytes > found->second.bytes - found->second.got) {
        return broken(from, "values that nobody accepted");
      }
      input.left = header.bytes;
      input.into = found->second.data + found->second.got;
      return;
    }
    case Type::credit:
      if (header.bytes > kCreditBytes - peer.credit) return broken(from, "credit that it never took");
      peer.credit += header.bytes;
      return launch_held(from);
    case Type::abort:
      if (header.bytes > kMaxReasonBytes) return broken(from, "a reason without end");
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
      finish(from, input.receive->ticket, 0);
      give_back(from, cost(header));
    }
    input.receive.reset();
    input.message = nullptr;
  } else if (header.type == Type::chunk) {
    const auto found = peer.accepted.find(header.id);
    found->second.got += header.bytes;
    if (found->second.got < found->second.bytes) return;
    finish(from, found->second.ticket, kHeaderBytes, found->second.lease.get());
    peer.accepted.erase(found);
  } else if (header.type == Type::abort) {
    const std::string who = "rank " + std::to_string(from);
    const bool us = header.tag == lane_->rank();
    const bool mismatch = us && header.failure == static_cast<std::uint8_t>(Failure::Kind::mismatch);
    peer.gone.kind = mismatch ? Failure::Kind::mismatch : Failure::Kind::peer_lost;
    peer.gone.rank = header.tag >= 0 && !us ? header.tag : from;
    peer.gone.text = who + (header.orderly != 0 ? " left: " : " gave up on the group: ") + input.reason;
    peer.gone.remote_reason = input.reason;
    peer.gone.orderly = header.orderly != 0;
  }
}

void PointToPoint::give_back(int to, std::size_t bytes) {
  Peer& peer = at(to);
  peer.owed += bytes;
  // Rarely: most exchanges then have no traffic but their own.
  if (peer.owed < kCreditBytes / 2) return;
  FrameHeader header;
  header.type = Type::credit;
  header.bytes = std::exchange(peer.owed, 0);
  peer.frames.push_back({header});
}

void PointToPoint::finish(int peer, Ticket ticket, std::uint64_t wire_bytes,
                          const transport::Pipe::RegistrationLease* lease) {
  --at(peer).outstanding;
  Done done{.ticket = ticket, .peer = peer, .wire_bytes = wire_bytes, .registrations = {}};
  if (lease != nullptr) done.registrations = {lease->hits(), lease->misses()};
  done_.push_back(done);
}

// --- the streams -----------------------------------------------------------------------------------------------------

Progress PointToPoint::poll() {
  bool moved = !done_.empty();
  for (int rank = 0; rank < lane_->size() && !fault_; ++rank) {
    if (rank == lane_->rank()) continue;
    moved |= write(rank);
    if (at(rank).outstanding == 0 && posted_to_any_ == 0) continue;
    moved |= read(rank);
    moved |= write(rank);  // answers to what came
  }
  if (!fault_) look_for_the_missing();
  if (fault_) return Progress::failed;
  return moved ? Progress::moved : Progress::idle;
}

bool PointToPoint::next_frame(int to) {
  Peer& peer = at(to);
  if (peer.writing) return true;
  if (peer.frames.empty()) return next_chunk(to);
  peer.writing = std::move(peer.frames.front());
  peer.frames.pop_front();
  return true;
}

// Of the messages that were accepted, in turn: one whose place is not named yet lets the others pass, since the
// receiver may have no names left but for theirs.
bool PointToPoint::next_chunk(int to) {
  Peer& peer = at(to);
  for (std::size_t looks = peer.streaming.size(); looks > 0; --looks) {
    Send send = std::move(peer.streaming.front());
    peer.streaming.pop_front();
    Frame frame{.header = {}, .data = send.data + send.sent};
    frame.bytes = std::min<std::size_t>(kChunkBytes, send.header.bytes - send.sent);
    frame.name = name_of(send.header.id, send.sent);
    frame.uses_rma = lane_->uses_rma(to, frame.bytes);
    if (frame.uses_rma && !lane_->is_posted(to, frame.name)) {
      peer.streaming.push_back(std::move(send));
      continue;
    }
    frame.header.type = Type::chunk;
    frame.header.id = send.header.id;
    frame.header.bytes = frame.bytes;
    frame.lease = send.lease;
    send.sent += frame.bytes;
    if (send.sent == send.header.bytes) {
      const std::size_t chunks = std::max<std::size_t>(1, (send.sent + kChunkBytes - 1) / kChunkBytes);
      frame.ticket = send.ticket;
      frame.wire_bytes = kHeaderBytes + send.sent + kHeaderBytes * chunks;
    } else {
      peer.streaming.push_back(std::move(send));
    }
    peer.writing = std::move(frame);
    return true;
  }
  return false;
}

bool PointToPoint::write(int to) {
  Peer& peer = at(to);
  bool moved = take_back(to);
  for (int call = 0; call < kCallsATurn && !peer.gone && next_frame(to); ++call) {
    Frame& frame = *peer.writing;
    iovec chunks[2];
    std::size_t count = 0;
    if (peer.written < kHeaderBytes) {
      chunks[count++] = {reinterpret_cast<std::byte*>(&frame.header) + peer.written, kHeaderBytes - peer.written};
    }
    const std::size_t from = peer.written - std::min(peer.written, kHeaderBytes);
    if (from < frame.bytes) chunks[count++] = {const_cast<std::byte*>(frame.data) + from, frame.bytes - from};
    const std::span<const iovec> all(chunks, count);
    const auto io = frame.uses_rma ? lane_->put(to, all, frame.name) : lane_->send(to, all);
    if (io.closed) {
      while (!fault_ && read(to)) {  // what it had sent before, and why it went
      }
      lose(to, io);
      return moved;
    }
    moved |= io.bytes > 0;
    peer.written += io.bytes;
    peer.taken += io.bytes;
    if (peer.written < kHeaderBytes + frame.bytes) break;
    if (frame.ticket != 0 || frame.uses_rma) {
      peer.in_flight.push_back({peer.taken, frame.ticket, frame.wire_bytes, std::move(frame.lease)});
    }
    peer.writing.reset();
    peer.written = 0;
  }
  return take_back(to) || moved;
}

// Sends whose memory came back are done.
bool PointToPoint::take_back(int to) {
  Peer& peer = at(to);
  if (peer.in_flight.empty()) return false;
  const std::uint64_t back = peer.taken - lane_->bytes_in_flight(to);
  bool moved = false;
  while (!peer.in_flight.empty() && peer.in_flight.front().end <= back) {
    const InFlight in_flight = std::move(peer.in_flight.front());
    peer.in_flight.pop_front();
    if (in_flight.ticket != 0) finish(to, in_flight.ticket, in_flight.wire_bytes, in_flight.lease.get());
    moved = true;
  }
  return moved;
}

bool PointToPoint::read(int from) {
  Peer& peer = at(from);
  Input& input = peer.input;
  if (peer.staging.empty()) peer.staging.resize(kStagingBytes);
  bool moved = false;
  name_places(from);
  for (int call = 0; call < kCallsATurn && !peer.gone && !fault_; ++call) {
    // At most the beginning of a header is left from before.
    std::copy(peer.staging.data() + peer.begin, peer.staging.data() + peer.end, peer.staging.data());
    peer.end -= std::exchange(peer.begin, 0);
    const std::size_t direct = input.left;
    const iovec chunks[2] = {{input.into, direct}, {peer.staging.data() + peer.end, kStagingBytes - peer.end}};
    const std::span<const iovec> all(chunks);
    const std::size_t asked = direct + kStagingBytes - peer.end;
    const auto io = lane_->receive(from, direct > 0 ? all : all.subspan(1));
    if (io.closed) {
      lose(from, io);
      return true;
    }
    if (io.bytes == 0) break;
    moved = true;
    const std::size_t placed = std::min(direct, io.bytes);
    input.into += placed;
    input.left -= placed;
    if (direct > 0 && input.left == 0) finish_input(from);
    peer.end += io.bytes - placed;
    consume(from);
    if (io.bytes < asked) break;  // that was all there is
  }
  return moved;
}

// Everything that lies in the staging buffer, but for half a header.
void PointToPoint::consume(int from) {
  Peer& peer = at(from);
  Input& input = peer.input;
  while (!fault_ && !peer.gone) {
    if (input.left > 0) {
      const std::size_t some = std::min(input.left, peer.end - peer.begin);
      if (some == 0) return;
      std::memcpy(input.into, peer.staging.data() + peer.begin, some);
      peer.begin += some;
      input.into += some;
      input.left -= some;
      if (input.left > 0) return;
      finish_input(from);
      continue;
    }
    if (peer.end - peer.begin < kHeaderBytes) return;
    FrameHeader header;
    std::memcpy(&header, peer.staging.data() + peer.begin, kHeaderBytes);
    peer.begin += kHeaderBytes;
    handle(from, header);
    if (!fault_ && input.left == 0) finish_input(from);
  }
}

void PointToPoint::wait_for(WaitSet& set) const {
  for (int rank = 0; rank < lane_->size(); ++rank) {
    const Peer& peer = at(rank);
    if (rank == lane_->rank() || peer.gone) continue;  // a closed connection would wake for ever
    const bool writes = peer.writing || !peer.frames.empty() || !peer.streaming.empty();
    const bool reads = peer.outstanding > 0 || posted_to_any_ > 0;
    const int events = (writes ? POLLOUT : 0) | (reads ? POLLIN : 0);
    if (events != 0 || !peer.in_flight.empty()) lane_->wait_for(rank, static_cast<short>(events), set.fds);
  }
}

bool PointToPoint::waits_for_memory() const {
  return std::any_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
    return peer.in_memory && (peer.outstanding > 0 || posted_to_any_ > 0);
  });
}

// --- what goes wrong -------------------------------------------------------------------------------------------------

void PointToPoint::lose(int peer, const transport::Mesh::Io& io) {
  if (!at(peer).gone) at(peer).gone = peer_lost(peer, io, MessageHeader());
}

void PointToPoint::broken(int peer, const std::string& what) {
  fault_ = {
      any_ticket(peer),
      {Failure::Kind::system, peer, "rank " + std::to_string(peer) + " sent " + what + " on the lane of messages"}};
}

void PointToPoint::look_for_the_missing() {
  bool all_gone = true;
  const Failure* lost = nullptr;
  for (int rank = 0; rank < lane_->size(); ++rank) {
    if (rank == lane_->rank()) continue;
    const Peer& peer = at(rank);
    all_gone &= static_cast<bool>(peer.gone);
    if (!peer.gone) continue;
    if (peer.outstanding > 0) {
      fault_ = {any_ticket(rank), peer.gone};
      return;
    }
    if (lost == nullptr || !peer.gone.orderly) lost = &peer.gone;
  }
  // Who left in order is only one fewer to hear from.
  if (posted_to_any_ > 0 && lost != nullptr && (all_gone || !lost->orderly)) {
    for (const auto& [key, queue] : posted_) {
      if (key.second == kAnySource) fault_ = {queue.front().ticket, *lost};
    }
  }
}

PointToPoint::Ticket PointToPoint::any_ticket(int rank) const {
  const Peer& peer = at(rank);
  if (peer.input.receive) return peer.input.receive->ticket;
  if (!peer.accepted.empty()) return peer.accepted.begin()->second.ticket;
  for (const auto& [key, queue] : posted_) {
    if (key.second == rank) return queue.front().ticket;
  }
  if (peer.writing && peer.writing->ticket != 0) return peer.writing->ticket;
  if (!peer.streaming.empty()) return peer.streaming.front().ticket;
  if (!peer.announced.empty()) return peer.announced.begin()->second.ticket;
  if (!peer.held.empty()) return peer.held.front().ticket;
  for (const InFlight& in_flight : peer.in_flight) {
    if (in_flight.ticket != 0) return in_flight.ticket;
  }
  for (const Frame& frame : peer.frames) {
    if (frame.ticket != 0) return frame.ticket;
  }
  return 0;
}

std::string PointToPoint::awaited(const Call& call) const {
  const bool any = call.root == kAnySource;
  std::string text = any ? "any rank" : "rank " + std::to_string(call.root);
  text += call.kind == Kind::send ? " to receive" : " to send";
  text += " with tag " + std::to_string(call.tag);
  if (call.kind == Kind::send) return text;
  // A wrong tag or source is the usual cause.
  constexpr int kMostNamed = 4;
  int named = 0;
  for (const auto& [key, queue] : kept_) {
    if (key.first != call.tag && key.second != call.root && !any) continue;
    text += (named == 0 ? "; what came is from rank " : ", from rank ") + std::to_string(key.second) + " with tag " +
            std::to_string(key.first);
    if (++named == kMostNamed) break;
  }
  return text;
}

void PointToPoint::abort(const Failure& failure) {
  const std::string& reason = failure.remote_reason.empty() ? failure.text : failure.remote_reason;
  FrameHeader header;
  header.type = Type::abort;
  header.failure = static_cast<std::uint8_t>(failure.kind);
  header.orderly = failure.orderly ? 1 : 0;
  header.tag = failure.rank;
  header.bytes = std::min(reason.size(), kMaxReasonBytes);
  const iovec chunks[2] = {{&header, kHeaderBytes},
                           {const_cast<char*>(reason.data()), static_cast<std::size_t>(header.bytes)}};
  for (int rank = 0; rank < lane_->size(); ++rank) {
    const Peer& peer = at(rank);
    if (!lane_->leads_to(rank) || peer.gone || peer.written > 0) continue;
    lane_->send(rank, chunks);
  }
}

bool PointToPoint::unconfirmed() const {
  for (int rank = 0; rank < lane_->size(); ++rank) {
    if (rank != lane_->rank() && !at(rank).gone && lane_->unconfirmed(rank) > 0) return true;
  }
  return false;
}

}  // namespace netfold::collective
