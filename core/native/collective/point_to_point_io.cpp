#include <netfold/collective/message.hpp>
#include <netfold/collective/point_to_point.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);
// Bytes read beyond the expected ones: several small messages in one call. Large values are read past the staging area.
constexpr std::size_t kStagingBytes = 16 << 10;
// System calls for a peer in one poll, so that no peer delays the other peers or a deadline.
constexpr int kCallsPerPoll = 16;

}  // namespace

// The name of the chunk that begins at byte `begin` of a message.
std::uint64_t PointToPoint::name_of(std::uint64_t message, std::size_t begin, std::size_t chunk_bytes) {
  constexpr int kChunkBits = 24;  // 16 TB of chunks of kChunkBytes
  return (message << kChunkBits) + begin / chunk_bytes;
}

Progress PointToPoint::poll() {
  bool moved = !done_.empty();
  if (matcher_.has_any_source()) moved |= read_from_any();
  for (std::size_t i = 0; i < busy_.size() && !fault_;) {
    const int rank = busy_[i];
    moved |= write(rank);
    if (at(rank).outstanding > 0) {
      moved |= read(rank);
      moved |= write(rank);  // answers to what was read
    }
    Peer& peer = at(rank);
    if (peer.has_work()) {
      ++i;
    } else {
      peer.is_busy = false;
      busy_[i] = busy_.back();
      busy_.pop_back();
    }
  }
  if (!fault_) fail_for_lost_peers();
  if (fault_) return Progress::failed;
  return moved ? Progress::moved : Progress::idle;
}

// Reads what has come, as long as a receive from any rank waits. The work is that of the ranks that sent something.
bool PointToPoint::read_from_any() {
  senders_.clear();
  readable_peers_->take(senders_);
  for (const int rank : senders_) {
    if (!std::exchange(at(rank).is_readable, true)) readable_.push_back(rank);
  }
  bool moved = false;
  for (std::size_t i = 0; i < readable_.size() && matcher_.has_any_source() && !fault_;) {
    const int rank = readable_[i];
    const bool may_have_more = read(rank);
    moved |= may_have_more;
    if (may_have_more && !at(rank).failure) {
      ++i;
    } else {
      at(rank).is_readable = false;
      readable_[i] = readable_.back();
      readable_.pop_back();
    }
  }
  return moved;
}

void PointToPoint::connection_changed(int peer) {
  if (readable_peers_ != nullptr) readable_peers_->watch(peer);
}

void PointToPoint::connection_closed(int peer) {
  if (readable_peers_ != nullptr) readable_peers_->closed(peer);
}

std::vector<int> PointToPoint::to_ask(std::int64_t now_ns) {
  return matcher_.has_any_source() ? readable_peers_->to_ask(now_ns) : std::vector<int>();
}

bool PointToPoint::next_frame(int to) {
  Peer& peer = at(to);
  if (peer.writing) return true;
  if (peer.frames.empty()) return next_chunk(to);
  peer.writing = std::move(peer.frames.front());
  peer.frames.pop_front();
  return true;
}

// Takes the accepted messages in turn. A chunk that the receiver has not posted yet does not block the other messages:
// the receiver may have no place left for more postings.
bool PointToPoint::next_chunk(int to) {
  Peer& peer = at(to);
  for (std::size_t tries = peer.streaming.size(); tries > 0; --tries) {
    Send send = std::move(peer.streaming.front());
    peer.streaming.pop_front();
    Frame frame{.header = {}, .data = send.data + send.sent};
    frame.bytes = std::min<std::size_t>(send.chunk_bytes, send.header.bytes - send.sent);
    frame.name = name_of(send.header.id, send.sent, send.chunk_bytes);
    frame.uses_rma = send.must_use_rma || lane_->uses_rma(to, frame.bytes);
    frame.gpu = send.gpu;
    if (frame.uses_rma && !lane_->is_posted(to, frame.name)) {
      peer.streaming.push_back(std::move(send));
      continue;
    }
    frame.header.type = FrameHeader::Type::chunk;
    frame.header.id = send.header.id;
    frame.header.bytes = frame.bytes;
    frame.lease = send.lease;
    send.sent += frame.bytes;
    if (send.sent == send.header.bytes) {
      const std::size_t chunks = std::max<std::size_t>(1, (send.sent + send.chunk_bytes - 1) / send.chunk_bytes);
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
  bool moved = reclaim(to);
  const std::uint64_t end = peer.sent_bytes + kSliceBytes;
  for (int call = 0; call < kCallsPerPoll && peer.sent_bytes < end && !peer.failure && next_frame(to); ++call) {
    Frame& frame = *peer.writing;
    iovec parts[2];
    std::size_t count = 0;
    if (peer.written < kHeaderBytes) {
      parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + peer.written, kHeaderBytes - peer.written};
    }
    const std::size_t first = peer.written - std::min(peer.written, kHeaderBytes);
    if (first < frame.bytes) {
      const std::size_t bytes = frame.uses_rma ? frame.bytes - first : std::min(frame.bytes - first, kSliceBytes);
      parts[count++] = {const_cast<std::byte*>(frame.data) + first, bytes};
    }
    const std::span<const iovec> all(parts, count);
    const auto io = frame.uses_rma ? lane_->put(to, all, frame.name, frame.gpu.get()) : lane_->send(to, all);
    if (io.closed) {
      while (!fault_ && read(to)) {  // messages that the peer sent before, and its abort
      }
      lose(to, io);
      return moved;
    }
    moved |= io.bytes > 0;
    if (io.bytes > 0) peer.waits_since_ns = 0;
    peer.written += io.bytes;
    peer.sent_bytes += io.bytes;
    if (peer.written < kHeaderBytes + frame.bytes) break;
    if (frame.ticket != 0 || frame.uses_rma) {
      peer.in_flight.push_back(
          {peer.sent_bytes, frame.ticket, frame.wire_bytes, std::move(frame.lease), std::move(frame.gpu)});
    }
    peer.writing.reset();
    peer.written = 0;
  }
  return reclaim(to) || moved;
}

// Finishes sends whose memory the pipe has returned.
bool PointToPoint::reclaim(int to) {
  Peer& peer = at(to);
  if (peer.in_flight.empty()) return false;
  const std::uint64_t returned = peer.sent_bytes - lane_->bytes_in_flight(to);
  bool moved = false;
  while (!peer.in_flight.empty() && peer.in_flight.front().end <= returned) {
    const InFlight in_flight = std::move(peer.in_flight.front());
    peer.in_flight.pop_front();
    if (in_flight.ticket != 0) finish(to, in_flight.ticket, 0, in_flight.wire_bytes, in_flight.lease);
    moved = true;
  }
  return moved;
}

// Posts the next chunks of the accepted messages, as many as the pipe takes. A message's last chunk may be too short
// for RMA.
void PointToPoint::post_chunks(int source) {
  for (auto& [id, receive] : at(source).accepted) {
    while (receive.posted < receive.bytes) {
      const std::size_t bytes = std::min(receive.chunk_bytes, receive.bytes - receive.posted);
      if ((receive.must_use_rma || lane_->uses_rma(source, bytes)) &&
          !lane_->post_receive(source, name_of(id, receive.posted, receive.chunk_bytes), receive.data + receive.posted,
                               bytes, receive.gpu.get())) {
        return;
      }
      receive.posted += bytes;
    }
  }
}

bool PointToPoint::read(int from) {
  Peer& peer = at(from);
  Input& input = peer.input;
  if (peer.staging.empty()) peer.staging.resize(kStagingBytes);
  std::size_t moved = 0;
  post_chunks(from);
  for (int call = 0; call < kCallsPerPoll && moved < kSliceBytes && !peer.failure && !fault_; ++call) {
    // At most the beginning of a header is left from the previous call.
    std::copy(peer.staging.data() + peer.begin, peer.staging.data() + peer.end, peer.staging.data());
    peer.end -= std::exchange(peer.begin, 0);
    const std::size_t direct = input.is_in_gpu ? input.left : std::min(input.left, kSliceBytes);
    const bool stages = direct == input.left;  // only what follows the message's bytes
    const iovec parts[2] = {{input.into, direct}, {peer.staging.data() + peer.end, kStagingBytes - peer.end}};
    const std::span<const iovec> all(parts, stages ? 2 : 1), staging(parts + 1, 1);
    const std::size_t wanted = direct + (stages ? kStagingBytes - peer.end : 0);
    const auto io = direct > 0 && input.is_in_gpu ? lane_->receive_into_gpu(from, {input.into, direct}, staging)
                                                  : lane_->receive(from, direct > 0 ? all : staging);
    if (io.closed) {
      lose(from, io);
      return true;
    }
    if (io.bytes == 0) break;
    moved += io.bytes;
    peer.waits_since_ns = 0;
    const std::size_t placed = input.is_in_gpu ? io.in_gpu : std::min(direct, io.bytes);
    input.into += placed;
    input.left -= placed;
    if (direct > 0 && input.left == 0) finish_input(from);
    peer.end += io.bytes - placed;
    consume(from);
    // The pipe has no more, but for bytes of a message in memory of a GPU: those it gives only to their own place.
    if (io.bytes < wanted && !(input.is_in_gpu && input.left > 0)) break;
  }
  return moved > 0;
}

// Handles everything in the staging area but an incomplete header at the end.
void PointToPoint::consume(int from) {
  Peer& peer = at(from);
  Input& input = peer.input;
  while (!fault_ && !peer.failure) {
    if (input.left > 0) {
      const std::size_t bytes = std::min(input.left, peer.end - peer.begin);
      if (bytes == 0) return;
      if (input.is_in_gpu) {
        return broken(from,
                      std::to_string(bytes) + " bytes for memory of a GPU into which it had to write them itself");
      }
      std::memcpy(input.into, peer.staging.data() + peer.begin, bytes);
      peer.begin += bytes;
      input.into += bytes;
      input.left -= bytes;
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
  for (const int rank : busy_) {
    const Peer& peer = at(rank);
    if (peer.failure) continue;  // a closed connection is always readable
    const bool writes = peer.writing || !peer.frames.empty() || !peer.streaming.empty();
    const bool reads = peer.outstanding > 0;
    const int events = (writes ? POLLOUT : 0) | (reads ? POLLIN : 0);
    if (events != 0 || !peer.in_flight.empty()) lane_->wait_for(rank, static_cast<short>(events), set.fds);
    if (events == 0 || !in_memory_[static_cast<std::size_t>(rank)] || lane_->was_connected(rank)) continue;
    const std::int64_t now = transport::now_ns();
    if (peer.waits_since_ns == 0) peer.waits_since_ns = now;
    if (now >= peer.waits_since_ns + kConnectNs) {
      lane_->hung_up(rank);  // makes the connection
    } else {
      set.wake_at(peer.waits_since_ns + kConnectNs);
    }
  }
  if (matcher_.has_any_source()) set.wake_at(readable_peers_->wait_for(set.fds, transport::now_ns()));
}

bool PointToPoint::waits_for_memory() const {
  if (node_ != nullptr && matcher_.has_any_source()) return true;
  return std::ranges::any_of(
      busy_, [this](int rank) { return in_memory_[static_cast<std::size_t>(rank)] && at(rank).outstanding > 0; });
}

bool PointToPoint::unconfirmed() const {
  for (int rank = 0; rank < lane_->size(); ++rank) {
    const Peer* peer = peers_[static_cast<std::size_t>(rank)].get();
    if (peer != nullptr && !peer->failure && lane_->unconfirmed(rank) > 0) return true;
  }
  return false;
}

void PointToPoint::lose(int peer, const transport::Mesh::Io& io) {
  if (at(peer).failure) return;
  Failure failure = peer_lost(peer, io, MessageHeader());
  failure.orderly = io.is_orderly;
  lose(peer, std::move(failure));
}

void PointToPoint::lose(int peer, Failure failure) {
  ++lost_count_;
  if (lost_ < 0 || !failure.orderly) lost_ = peer;
  at(peer).failure = std::move(failure);
}

void PointToPoint::fail_for_lost_peers() {
  for (const int rank : busy_) {
    const Peer& peer = at(rank);
    if (!peer.failure || peer.outstanding == 0) continue;
    fault_ = {any_ticket(rank), peer.failure};
    return;
  }
  if (lost_ < 0 || !matcher_.has_any_source()) return;
  // A receive from any source can still match while another rank is there, unless a rank left with a failure.
  const Failure& failure = at(lost_).failure;
  if (lost_count_ == lane_->size() - 1 || !failure.orderly) fault_ = {matcher_.posted_from(kAnySource), failure};
}

// A call that needs the peer; 0 where there is none.
PointToPoint::Ticket PointToPoint::any_ticket(int rank) const {
  const Peer& peer = at(rank);
  if (peer.input.receive) return peer.input.receive->ticket;
  if (!peer.accepted.empty()) return peer.accepted.begin()->second.ticket;
  if (const Ticket ticket = matcher_.posted_from(rank)) return ticket;
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

}  // namespace netfold::collective
