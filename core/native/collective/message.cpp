#include <netfold/collective/message.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr std::size_t kMaxReasonBytes = 1024;

// The size of the chunk that begins at byte `begin` of a message of `bytes`.
std::size_t rma_chunk(std::size_t bytes, std::size_t begin) { return std::min(kRmaChunkBytes, bytes - begin); }

// The name of a chunk, equal at both ends. Bit 31 keeps it apart from the names of a stream's chunks.
std::uint64_t name_of(const MessageHeader& header, std::size_t begin) {
  constexpr std::uint64_t kOfMessage = std::uint64_t{1} << 31;
  return (std::uint64_t{header.sequence} << 32) + kOfMessage + begin / kRmaChunkBytes;
}

}  // namespace

MessageHeader MessageHeader::of(const Call& call, std::uint64_t bytes) {
  // A pairwise exchange is a paced direct one: the messages are the same.
  const bool is_paced = call.algorithm == AlgorithmId::pairwise;
  // Only where every rank must give the same size. Uneven gathers and exchanges compare `bytes` message by message.
  const bool is_whole = call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::broadcast;
  return {.sequence = call.sequence,
          .kind = call.kind,
          .element = call.element(),
          .reduce = call.reduce,
          .wire = call.wire,
          .algorithm = is_paced ? AlgorithmId::direct : call.algorithm,
          .table = call.table,
          .root = packed_root(call),
          .average = call.average,
          .between = call.between,
          .step_of = call.step_of,
          .elements = call.layout != 0 ? call.layout
                      : is_whole       ? call.elements()
                                       : 0,
          .bytes = bytes};
}

std::string MessageHeader::text() const {
  std::string text = summary();
  text.pop_back();
  return text + ", " + std::to_string(bytes) + " bytes)";
}

std::string MessageHeader::summary() const {
  std::string text = std::string(name(kind)) + " #" + std::to_string(sequence);
  const auto whole = static_cast<Kind>((step_of & ~kStepOfAverage) - 1);
  const bool has_layout = step_of > 0 && (whole == Kind::all_gather || whole == Kind::reduce_scatter);
  if (step_of > 0) {
    text += std::string(" (a step of ") + name(whole) + ((step_of & kStepOfAverage) != 0 ? ", avg)" : ")");
  }
  if (has_layout) text += " (digest of all sizes: " + std::to_string(elements & 0xffff) + ")";
  const bool is_coalesced = (elements & kCoalesced) != 0;
  if (is_coalesced && !has_layout) text += coalesced_text(elements);
  if (elements > 0 && !has_layout && !is_coalesced)
    text += " of " + std::to_string(elements / static_cast<unsigned>(carried_values(element)));
  text += std::string(" ") + name(element);
  text += std::string(" (") + (average != Averaging::none ? "avg" : kernels::name(reduce));
  text += ", root " + std::to_string(root & 0xffff);
  if (root >> 16 > 0) text += " for root " + std::to_string((root >> 16) - 1) + " of the whole call";
  text += std::string(", ") + name(algorithm);
  return text + ", wire " + kernels::name(wire) + ")";
}

transport::Mesh::Io Outgoing::send(transport::Mesh& mesh, std::size_t most) {
  const std::size_t begin = sent_ - std::min(sent_, sizeof header_);
  auto* data = const_cast<std::byte*>(data_) + begin;
  const std::size_t chunk = rma_chunk(bytes_, begin);
  const bool by_rma = uses_rma(mesh, chunk);
  if (sent_ >= sizeof header_ && by_rma) {
    const iovec values{data, chunk};
    return mesh.put(peer_, {&values, 1}, name_of(header_, begin));
  }
  iovec chunks[2];
  std::size_t count = 0;
  if (sent_ < sizeof header_) {
    chunks[count++] = {reinterpret_cast<std::byte*>(&header_) + sent_, sizeof header_ - sent_};
  }
  if (chunk > 0 && !by_rma) chunks[count++] = {data, std::min(most, bytes_ - begin)};
  return mesh.send(peer_, {chunks, count});
}

std::size_t Outgoing::advance(transport::Mesh& mesh, Failure& failure, std::size_t most) {
  if (done()) return 0;
  std::size_t moved = 0;
  while (!all_sent() && moved < most) {
    const auto io = send(mesh, most);
    if (io.closed) {
      failure = peer_lost(peer_, io, header_);
      return moved;
    }
    if (io.bytes == 0) break;
    sent_ += io.bytes;
    moved += io.bytes;
    // Copied bytes go in one call; a second call would send nothing.
    if (sent_ < sizeof header_ || !uses_rma(mesh, rma_chunk(bytes_, sent_ - sizeof header_))) break;
  }
  is_returned_ = mesh.bytes_in_flight(peer_) == 0;
  using Position = transport::Mesh::StreamPosition;
  mesh.set_stream_position(peer_, sent_ > 0 && !all_sent() ? Position::inside : Position::between_messages);
  return moved;
}

std::size_t Outgoing::free_before(const transport::Mesh& mesh, const Buffer& memory) const {
  if (done()) return memory.bytes;
  const std::size_t kept = mesh.bytes_in_flight(peer_);
  const std::size_t taken = sent_ - std::min(sent_, kept + sizeof header_);
  const std::byte* needed = data_ + taken;
  if (needed >= memory.data + memory.bytes || data_ + bytes_ <= memory.data) return memory.bytes;
  return needed > memory.data ? static_cast<std::size_t>(needed - memory.data) : 0;
}

transport::Mesh::Io IncomingHeader::receive(transport::Mesh& mesh, std::byte* into, std::size_t bytes) {
  if (early_.empty()) return mesh.receive(peer_, into, bytes);
  const std::size_t count = std::min(bytes, early_.size());
  std::memcpy(into, early_.data(), count);
  early_.erase(early_.begin(), early_.begin() + static_cast<std::ptrdiff_t>(count));
  return {.bytes = count};
}

std::size_t IncomingHeader::advance(transport::Mesh& mesh, Failure& failure) {
  std::size_t moved = 0;
  if (received_ < sizeof header_) {
    const auto io = receive(mesh, reinterpret_cast<std::byte*>(&header_) + received_, sizeof header_ - received_);
    if (io.closed) {
      failure = peer_lost(peer_, io, expected_);
      return 0;
    }
    received_ += io.bytes;
    moved = io.bytes;
    if (received_ < sizeof header_) return moved;
    if (header_.magic == MessageHeader::kMagic && header_.is_abort != 0) {
      expects_reason_ = true;
    } else if (std::memcmp(&header_, &expected_, sizeof header_) != 0) {
      failure = mismatch(peer_, header_, mesh.rank(), expected_);
      return 0;
    }
  }
  if (expects_reason_) {
    std::byte chunk[kMaxReasonBytes];
    const std::size_t reason_bytes = std::min(header_.reason_bytes(), kMaxReasonBytes);
    const auto io = receive(mesh, chunk, reason_bytes - reason_.size());
    reason_.append(reinterpret_cast<const char*>(chunk), io.bytes);
    if (io.closed || reason_.size() >= reason_bytes) {
      failure = remote_abort(peer_, header_.root, reason_,
                             {header_.sequence, static_cast<std::int64_t>(header_.elements)}, mesh.rank(), expected_);
    }
    moved += io.bytes;
  }
  return moved;
}

void Incoming::post_receives(transport::Mesh& mesh) {
  while (among_ == Among::only && posted_ < bytes_ && posted_ < received_ + kAhead) {
    const std::size_t chunk = rma_chunk(bytes_, posted_);
    if (mesh.uses_rma(peer(), chunk) &&
        !mesh.post_receive(peer(), name_of(header_.expected(), posted_), data_ + posted_, chunk)) {
      return;
    }
    posted_ += chunk;
  }
}

std::size_t Incoming::advance(transport::Mesh& mesh, Failure& failure, std::size_t most) {
  std::size_t moved = 0;
  post_receives(mesh);
  if (!header_.done()) {
    // A small message costs one call of the kernel, with the header of the peer's next message.
    if (bytes_ <= kSmallBytes && !mesh.uses_rma(peer(), bytes_)) {
      mesh.peek(peer(), sizeof(MessageHeader) + bytes_ + sizeof(MessageHeader));
    }
    moved = header_.advance(mesh, failure);
    if (failure || !header_.done()) return moved;
  }
  while (received_ < bytes_ && moved < most) {
    const auto io = mesh.receive(peer(), data_ + received_, std::min(most, bytes_ - received_));
    if (io.closed) {
      failure = peer_lost(peer(), io, MessageHeader());
      return moved;
    }
    if (io.bytes == 0) break;
    received_ += io.bytes;
    moved += io.bytes;
    post_receives(mesh);
  }
  return moved;
}

void TensorRegistrations::acquire(const Call& call, transport::Mesh& mesh) {
  const auto add = [&](const Buffer& buffer) {
    if (buffer.bytes == 0) return;
    if (auto lease = mesh.lease(buffer.data, buffer.bytes)) leases_.push_back(std::move(lease));
  };
  for (const Buffer& output : call.outputs) add(output);
  for (const Buffer& input : call.inputs) {
    const auto is_same = [&](const Buffer& output) { return output.data == input.data && output.bytes == input.bytes; };
    if (std::none_of(call.outputs.begin(), call.outputs.end(), is_same)) add(input);
  }
}

Algorithm::Registrations TensorRegistrations::registrations() const {
  Algorithm::Registrations all;
  for (const auto& lease : leases_) all += {lease->hits, lease->misses};
  return all;
}

Failure mismatch(int peer, const MessageHeader& theirs, int self, const MessageHeader& ours) {
  Failure failure{Failure::Kind::mismatch, peer,
                  "rank " + std::to_string(peer) + " is in " + theirs.text() + ", this rank " + std::to_string(self) +
                      " in " + ours.text() +
                      "; every rank must make the same calls in the same order with the same sizes"};
  failure.their_call = theirs.sequence;
  return failure;
}

Failure remote_abort(int peer, int fault, const std::string& reason, Expired expired, int self,
                     const MessageHeader& during) {
  // The peer may pass on another rank's failure. That rank is at fault, unless it is this one.
  return {.kind = Failure::Kind::peer_lost,
          .rank = fault >= 0 && fault != self ? fault : peer,
          .text = "rank " + std::to_string(peer) + " gave up on the group during " + during.text() + ": " + reason,
          .remote_reason = reason,
          .expired = expired};
}

Failure peer_lost(int peer, const transport::Mesh::Io& io, const MessageHeader& during) {
  std::string text =
      "rank " + std::to_string(peer) + (io.is_ours ? " is not reached any more" : " closed its connection");
  if (io.error != 0) text += std::string(" (") + std::strerror(io.error) + ")";
  if (during.sequence != 0) text += " during " + during.text();
  text += io.why != nullptr && !io.why->empty() ? "; " + *io.why : "; it died or left the group: see its own output";
  return {Failure::Kind::peer_lost, peer, text};
}

Failure read_last_abort(transport::Mesh& mesh, int peer, const Call& call, Failure lost) {
  IncomingHeader last(call, peer, 0);
  Failure reported;
  while (!reported && last.advance(mesh, reported) > 0) {
  }
  return reported.remote_reason.empty() ? lost : reported;
}

Failure find_gave_up(transport::Mesh& mesh, int peer, const Call& call) {
  MessageHeader theirs;
  const auto ahead = mesh.peek(peer, sizeof theirs);
  if (ahead.size() < sizeof theirs) return {};
  std::memcpy(&theirs, ahead.data(), sizeof theirs);
  const MessageHeader ours = MessageHeader::of(call, 0);
  if (theirs.is_abort != 0) {
    // A rank that finished the call and failed or left later takes nothing from this rank's success.
    if (theirs.unfinished() > call.sequence) return {};
    return read_last_abort(mesh, peer, call, remote_abort(peer, theirs.root, "", {}, mesh.rank(), ours));
  }
  // The next call, or another step of this one. A split adds a step behind a whole call, and where a switch is lost inside
  // a step, the steps of that come between: only steps of the same level have comparable headers.
  const bool have_roots = theirs.root >> 16 != 0 && ours.root >> 16 != 0;
  const bool is_same_whole = theirs.step_of == ours.step_of && theirs.root >> 16 == ours.root >> 16;
  const bool is_step = (theirs.step_of != 0 || ours.step_of != 0) && (is_same_whole || !have_roots);
  if (theirs.sequence > call.sequence || (theirs.sequence == call.sequence && is_step)) return {};
  return mismatch(peer, theirs, mesh.rank(), ours);
}

void send_abort(transport::Mesh& mesh, const Failure& failure, std::uint32_t unfinished) {
  const std::string& reason = failure.remote_reason.empty() ? failure.text : failure.remote_reason;
  MessageHeader header;
  header.is_abort = 1;
  header.root = failure.rank;
  header.sequence = failure.expired.call;
  header.elements = static_cast<std::uint64_t>(failure.expired.timeout_ns);
  const std::size_t reason_bytes = std::min(reason.size(), kMaxReasonBytes);
  header.bytes = MessageHeader::packed_abort(reason_bytes, unfinished);
  auto marker = ChunkMarker::abort;
  const iovec chunks[3] = {
      {&marker, sizeof marker}, {&header, sizeof header}, {const_cast<char*>(reason.data()), reason_bytes}};
  const std::span<const iovec> all(chunks);
  for (int peer = 0; peer < mesh.size(); ++peer) {
    const auto position = mesh.stream_position(peer);
    if (peer == mesh.rank() || !mesh.was_connected(peer) || position == transport::Mesh::StreamPosition::inside)
      continue;
    mesh.send_last(peer, position == transport::Mesh::StreamPosition::between_chunks ? all : all.subspan(1));
  }
}

}  // namespace netfold::collective
