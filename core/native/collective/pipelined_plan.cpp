#include <netfold/collective/pipelined_plan.hpp>
#include <netfold/kernels/convert.hpp>

#include <array>
#include <cstring>
#include <utility>

namespace netfold::collective {
namespace {

constexpr std::size_t kMinChunkBytes = 16 << 10;
constexpr std::size_t kMinFabricChunkBytes = 64 << 10;
constexpr std::size_t kMaxChunkBytes = 256 << 10;
ChunkMarker chunk_marker = ChunkMarker::chunk;  // never written: iovec takes no const

std::size_t chunks_between(std::size_t block_bytes, std::size_t least, std::size_t least_bytes) {
  const std::size_t wanted = std::clamp(block_bytes / least, least_bytes, kMaxChunkBytes);
  return std::max<std::size_t>(1, (block_bytes + wanted - 1) / wanted);
}

}  // namespace

Span part(Span whole, std::size_t parts, std::size_t index) {
  return {whole.first + whole.count / parts * index + std::min(index, whole.count % parts),
          whole.count / parts + (index < whole.count % parts ? 1 : 0)};
}

Buffer part(const Buffer& whole, std::size_t parts, std::size_t index, std::size_t unit) {
  const Span range = part({0, whole.bytes / unit}, parts, index);
  return {whole.data + range.first * unit, range.count * unit};
}

std::size_t PipelinedPlan::chunks_of(std::size_t block_bytes) const {
  return mesh_.prefers_large_chunks() ? chunks_between(block_bytes, 2, kMinFabricChunkBytes)
                                      : chunks_between(block_bytes, 4, kMinChunkBytes);
}

std::size_t PipelinedPlan::pipeline_chunks_of(std::size_t block_bytes) const {
  return chunks_between(block_bytes, 64, mesh_.prefers_large_chunks() ? kMinFabricChunkBytes : kMinChunkBytes);
}

PipelinedPlan::PipelinedPlan(const Call& call, transport::Mesh& mesh, Team team)
    : call_(call),
      mesh_(mesh),
      team_(std::move(team)),
      reduction_(call, team_),
      element_bytes_(kernels::element_bytes(call.dtype)),
      wire_element_bytes_(kernels::element_bytes(call.wire)),
      converts_(call.wire != call.dtype) {}

void PipelinedPlan::finish_plan() {
  std::size_t largest = 0;
  for (Out& out : outs_) {
    std::size_t bytes = 0;
    std::size_t longest = 0;
    for (const Send& chunk : out.chunks) {
      bytes += sizeof(ChunkMarker) + wire_bytes_of(chunk.bytes);
      longest = std::max(longest, chunk.bytes);
    }
    if (converts_) out.staging.resize(wire_bytes_of(longest));
    out.header = MessageHeader::of(call_, bytes);
  }
  for (In& in : ins_) {
    std::size_t bytes = 0;
    std::size_t staged = 0;
    for (const Receive& chunk : in.chunks) {
      bytes += sizeof(ChunkMarker) + wire_bytes_of(chunk.bytes);
      if (chunk.operand != nullptr || converts_) staged = std::max(staged, chunk.bytes);
    }
    in.slot_bytes = wire_bytes_of(staged);
    in.slots = uses_rma(in.peer, staged) ? kAhead : 1;
    const std::size_t staging = in.slots * in.slot_bytes;
    if (in.slots > 1) in.staging = mesh_.scratch(in.peer, staging);
    if (in.staging == nullptr && staging > 0) in.staging = std::make_unique_for_overwrite<std::byte[]>(staging);
    in.expected = MessageHeader::of(call_, bytes);
    largest = std::max(largest, staged);
  }
  if (converts_) decoded_.resize(largest);
  copies_.add_own_block(call_, team_.position());
  slice_bytes_ = slice_bytes(outs_.size() + ins_.size());
  lease_tensors();
}

// The tensors whose chunks go by RMA.
void PipelinedPlan::lease_tensors() {
  const auto any = [&](const auto& streams) {
    return std::any_of(streams.begin(), streams.end(), [&](const auto& stream) {
      return std::any_of(stream.chunks.begin(), stream.chunks.end(),
                         [&](const auto& chunk) { return uses_rma(stream.peer, chunk.bytes); });
    });
  };
  if (any(outs_) || any(ins_)) tensor_registrations_.acquire(call_, mesh_);
}

bool PipelinedPlan::reached(const Mark& mark) const {
  return mark.stream < 0 || complete_[static_cast<std::size_t>(mark.stream)] >= mark.chunks;
}

std::size_t PipelinedPlan::wire_bytes_of(std::size_t bytes) const {
  return converts_ ? bytes / element_bytes_ * wire_element_bytes_ : bytes;
}

// The next chunk's values in the wire format.
const std::byte* PipelinedPlan::encoded(Out& out) {
  const Send& chunk = out.chunks[out.next];
  if (!out.encoded) {
    const std::size_t count = chunk.bytes / element_bytes_;
    kernels::convert(call_.wire, out.staging.data(), call_.dtype, chunk.data, count);
    if (chunk.finished) kernels::convert(call_.dtype, chunk.data, call_.wire, out.staging.data(), count);
    out.encoded = true;
  }
  return out.staging.data();
}

// Collects what may be sent now, header first, for one socket call. Returns the number of parts.
std::size_t PipelinedPlan::gather(Out& out, std::span<iovec> parts, std::size_t* bytes) {
  std::size_t count = 0;
  const auto append = [&](const void* data, std::size_t length, std::size_t skip) {
    if (skip >= length || *bytes >= slice_bytes_) return;
    const std::size_t some = std::min(length - skip, slice_bytes_ - *bytes);
    parts[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skip, some};
    *bytes += some;
  };
  append(&out.header, sizeof out.header, out.header_sent);
  std::size_t skip = out.sent;
  for (std::size_t i = out.next; i < out.chunks.size() && count + 2 <= parts.size() && *bytes < slice_bytes_; ++i) {
    const Send& chunk = out.chunks[i];
    if (skip == 0 && (!reached(chunk.after) || uses_rma(out.peer, chunk.bytes))) break;
    append(&chunk_marker, sizeof chunk_marker, skip);
    append(converts_ ? encoded(out) : chunk.data, wire_bytes_of(chunk.bytes),
           skip > sizeof chunk_marker ? skip - sizeof chunk_marker : 0);
    skip = 0;
    if (converts_) break;  // one staging area, one chunk
  }
  return count;
}

// Sends the next chunk by RMA.
bool PipelinedPlan::put(Out& out) {
  const Send& chunk = out.chunks[out.next];
  const iovec parts[2] = {{&chunk_marker, sizeof chunk_marker}, {chunk.data, chunk.bytes}};
  const auto io = mesh_.put(out.peer, parts, name_of(out.next));
  if (io.closed) record_lost(out, io);
  if (io.bytes > 0) account(out, io.bytes);
  return io.bytes > 0;
}

// Chunks whose memory the pipe has returned are complete.
bool PipelinedPlan::reclaim(Out& out) {
  if (out.returned == out.next) return false;
  const std::size_t before = out.returned;
  const std::size_t begun = out.sent;
  const std::size_t in_flight = std::max(mesh_.bytes_in_flight(out.peer), begun) - begun;
  while (out.returned < out.next && out.in_flight > in_flight) {
    out.in_flight -= sizeof(ChunkMarker) + wire_bytes_of(out.chunks[out.returned].bytes);
    ++out.returned;
  }
  complete_[static_cast<std::size_t>(out.stream)] = out.returned;
  return out.returned > before;
}

bool PipelinedPlan::advance(Out& out) {
  bool moved = reclaim(out);
  while (!out.all_sent() && out.slice > 0) {
    const bool is_next = out.header_sent == sizeof out.header && out.sent == 0;
    if (is_next && uses_rma(out.peer, out.chunks[out.next].bytes)) {
      if (!reached(out.chunks[out.next].after) || !put(out)) break;
      moved = true;
      continue;
    }
    std::array<iovec, 1 + 2 * kBatchChunks> parts;
    std::size_t wanted = 0;
    const std::size_t count = gather(out, parts, &wanted);
    if (count == 0) break;
    const auto io = mesh_.send(out.peer, {parts.data(), count});
    if (io.closed) {
      record_lost(out, io);
      return moved;
    }
    if (io.bytes == 0) break;
    moved = true;
    account(out, io.bytes);
    if (io.bytes < wanted) break;
  }
  return reclaim(out) || moved;
}

void PipelinedPlan::account(Out& out, std::size_t bytes) {
  counts_.wire_bytes += bytes;
  out.slice -= std::min(out.slice, bytes);
  const std::size_t of_header = std::min(bytes, sizeof out.header - out.header_sent);
  out.header_sent += of_header;
  bytes -= of_header;
  while (bytes > 0) {
    const std::size_t whole = sizeof(ChunkMarker) + wire_bytes_of(out.chunks[out.next].bytes);
    const std::size_t count = std::min(bytes, whole - out.sent);
    out.sent += count;
    bytes -= count;
    if (out.sent < whole) break;
    out.sent = 0;
    out.encoded = false;
    out.in_flight += whole;
    ++out.next;
  }
  using Position = transport::Mesh::StreamPosition;
  const bool inside = out.sent > 0 || out.header_sent < sizeof out.header;
  mesh_.set_stream_position(out.peer, inside           ? Position::inside
                                      : out.all_sent() ? Position::between_messages
                                                       : Position::between_chunks);
}

bool PipelinedPlan::push() {
  bool moved = false;
  for (Out& out : outs_) {
    if (failure_) break;
    if (!out.done()) moved |= advance(out);
  }
  return moved;
}

// Whether the next chunk's values may be read. After a failure they may always be read: an abort may follow them.
bool PipelinedPlan::may_read_values(const In& in) const {
  return in.next < in.chunks.size() && (failure_ || reached(in.chunks[in.next].after));
}

// Whether there are bytes to read that have a place in memory.
bool PipelinedPlan::may_read(const In& in) const {
  if (!in.has_header() || in.unexpected) return true;
  return in.next < in.chunks.size() && (in.received < sizeof in.marker || may_read_values(in));
}

std::byte* PipelinedPlan::target(In& in, std::size_t number) {
  const Receive& chunk = in.chunks[number];
  const bool in_place = chunk.operand == nullptr && !converts_;
  return in_place ? chunk.into : in.staging.get() + number % in.slots * in.slot_bytes;
}

// Whether a chunk's buffer overlaps an earlier chunk that is not stored yet. RMA may write chunks out of order.
bool PipelinedPlan::overlaps(const In& in, std::size_t number) const {
  const Receive& chunk = in.chunks[number];
  const auto meets = [&](const std::byte* other, std::size_t bytes) {
    return other != nullptr && chunk.into < other + bytes && other < chunk.into + chunk.bytes;
  };
  for (std::size_t i = in.next; i < number && chunk.operand == nullptr; ++i) {
    const Receive& earlier = in.chunks[i];
    if (meets(earlier.into, earlier.bytes) || meets(earlier.operand, earlier.bytes)) return true;
  }
  return false;
}

// Posts the buffers of the next chunks, as far as they may be written.
void PipelinedPlan::post_receives(In& in) {
  in.posted = std::max(in.posted, in.next);
  while (in.posted < std::min(in.chunks.size(), in.next + kAhead)) {
    const Receive& chunk = in.chunks[in.posted];
    if (uses_rma(in.peer, chunk.bytes)) {
      if (!reached(chunk.after) || overlaps(in, in.posted)) return;
      if (!mesh_.post_receive(in.peer, name_of(in.posted), target(in, in.posted), chunk.bytes)) return;
    }
    ++in.posted;
  }
}

bool PipelinedPlan::advance(In& in) {
  if (in.unexpected) return read_abort(in, {});
  if (!failure_) post_receives(in);
  std::size_t moved = 0;
  while (!in.done() && may_read(in) && moved < slice_bytes_) {
    std::array<iovec, 3> parts;
    std::size_t count = 0;
    std::size_t wanted = 0;
    const auto append = [&](void* data, std::size_t bytes) {
      if (bytes > 0) parts[count++] = {data, bytes};
      wanted += bytes;
    };
    append(reinterpret_cast<std::byte*>(&in.header) + in.header_received, sizeof in.header - in.header_received);
    std::size_t whole = 0;
    std::byte* into = nullptr;
    if (in.next < in.chunks.size()) {
      const Receive& chunk = in.chunks[in.next];
      whole = sizeof in.marker + wire_bytes_of(chunk.bytes);
      into = target(in, in.next);
      const std::size_t of_marker = std::min(in.received, sizeof in.marker);
      append(reinterpret_cast<std::byte*>(&in.marker) + of_marker, sizeof in.marker - of_marker);
      const std::size_t of_values = in.received - of_marker;
      const std::size_t left = whole - sizeof in.marker - of_values;
      if (may_read_values(in)) append(into + of_values, std::min(left, slice_bytes_));
    }
    const auto io = mesh_.receive(in.peer, {parts.data(), count});
    if (io.closed) {
      record(peer_lost(in.peer, io, MessageHeader::of(call_, 0)));
      return moved > 0;
    }
    if (io.bytes == 0) break;
    moved += io.bytes;
    const std::size_t of_header = std::min(io.bytes, sizeof in.header - in.header_received);
    in.header_received += of_header;
    in.received += io.bytes - of_header;
    if (!in.has_header()) break;
    const std::size_t values = in.received > sizeof in.marker ? in.received - sizeof in.marker : 0;
    if (of_header > 0 && std::memcmp(&in.header, &in.expected, sizeof in.header) != 0) {
      std::vector<std::byte> early(sizeof in.header + in.received);
      std::memcpy(early.data(), &in.header, sizeof in.header);
      std::memcpy(early.data() + sizeof in.header, &in.marker, in.received - values);
      if (values > 0) std::memcpy(early.data() + sizeof in.header + sizeof in.marker, into, values);
      return read_abort(in, early);
    }
    if (in.received >= sizeof in.marker && in.marker != ChunkMarker::chunk) return read_abort(in, {into, values});
    if (in.next < in.chunks.size() && in.received == whole) {
      if (!failure_) store(in);
      in.received = 0;
      received_bytes_ += whole;
      complete_[static_cast<std::size_t>(in.stream)] = ++in.next;
      if (!failure_) post_receives(in);
      // Send the chunks that have become possible before reading more.
      push();
    }
    if (io.bytes < wanted) break;  // the socket had no more
  }
  return moved > 0;
}

// Reads an unexpected header, or an abort that ends the stream. The rest of it may come later.
bool PipelinedPlan::read_abort(In& in, std::span<const std::byte> early) {
  if (!in.unexpected) in.unexpected.emplace(call_, in.peer, in.expected.bytes, early);
  Failure reported;
  while (!reported && in.unexpected->advance(mesh_, reported) > 0) {
  }
  if (reported) record(std::move(reported));
  return true;
}

void PipelinedPlan::store(In& in) {
  const Receive& chunk = in.chunks[in.next];
  const std::size_t count = chunk.bytes / element_bytes_;
  if (chunk.operand == nullptr) {
    if (converts_) kernels::convert(call_.dtype, chunk.into, call_.wire, in.staging.get(), count);
    return;  // without a conversion it was received in place
  }
  const std::byte* arrived = target(in, in.next);
  if (converts_) {
    kernels::convert(call_.dtype, decoded_.data(), call_.wire, arrived, count);
    arrived = decoded_.data();
  }
  if (chunk.arrived_first) {
    reduction_.merge(chunk.into, arrived, chunk.arrived_of, chunk.operand, chunk.operand_of, count, chunk.finishes);
  } else {
    reduction_.merge(chunk.into, chunk.operand, chunk.operand_of, arrived, chunk.arrived_of, count, chunk.finishes);
  }
}

// Keeps the first failure; another rank's report or a mismatch replaces a broken connection.
void PipelinedPlan::record(Failure failure) {
  const bool is_broken_connection = failure_.kind == Failure::Kind::peer_lost && failure_.remote_reason.empty();
  const bool explains = !failure.remote_reason.empty() || failure.kind == Failure::Kind::mismatch;
  if (!failure_ || (is_broken_connection && explains)) failure_ = std::move(failure);
}

// The peer of a stream closed its connection. Its abort may still be unread, and is read here unless its own stream to
// this rank will deliver the abort.
void PipelinedPlan::record_lost(const Out& out, const transport::Mesh::Io& io) {
  Failure lost = peer_lost(out.peer, io, MessageHeader::of(call_, 0));
  const auto delivers = [&](const In& in) { return in.peer == out.peer && !in.done(); };
  const bool is_read_later = std::any_of(ins_.begin(), ins_.end(), delivers);
  record(is_read_later ? std::move(lost) : read_last_abort(mesh_, out.peer, call_, std::move(lost)));
}

Progress PipelinedPlan::poll(std::int64_t now_ns) {
  if (!failure_ && gave_up_timer_.is_due(now_ns)) find_gave_up();
  if (failure_) return finish_chunks(now_ns);
  for (Out& out : outs_) out.slice = slice_bytes_;
  bool moved = push();
  moved |= copies_.advance();  // the first chunks need not wait for this
  if (!failure_ || failure_.kind == Failure::Kind::peer_lost) {
    for (In& in : ins_) {
      if (!in.done()) moved |= advance(in);
    }
  }
  if (failure_) return finish_chunks(now_ns);
  const auto done = [](const auto& stream) { return stream.done(); };
  if (std::all_of(outs_.begin(), outs_.end(), done) && std::all_of(ins_.begin(), ins_.end(), done)) {
    if (!std::exchange(is_complete_, true)) add_last_copies(copies_);
    if (!copies_.done()) return Progress::moved;
    find_gave_up();
    if (failure_) return Progress::failed;
    counts_.registrations = tensor_registrations_.registrations();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::idle;
}

// Visits the ranks of the call that send nothing more in it.
template <class Visit>
void PipelinedPlan::for_each_silent(const Visit& visit) const {
  for (const In& in : ins_) {
    if (in.done()) visit(in.peer);
  }
  for (const Out& out : outs_) {
    const auto reads = [&](const In& in) { return in.peer == out.peer; };
    if (std::ranges::none_of(ins_, reads)) visit(out.peer);
  }
}

void PipelinedPlan::find_gave_up() {
  for_each_silent([this](int peer) {
    if (!failure_) failure_ = collective::find_gave_up(mesh_, peer, call_);
  });
}

// Completes half-sent chunks: an abort can be sent only between two chunks.
Progress PipelinedPlan::finish_chunks(std::int64_t now_ns) {
  if (give_up_ns_ < 0) give_up_ns_ = now_ns + kLastChunkNs;
  bool waits = false;
  for (Out& out : outs_) {
    while (out.sent > 0 && mesh_.leads_to(out.peer) && now_ns < give_up_ns_) {
      std::array<iovec, 2> parts;  // one chunk
      std::size_t wanted = 0;
      const std::size_t count = gather(out, parts, &wanted);
      const auto io = mesh_.send(out.peer, {parts.data(), count});
      if (io.closed) {
        out.sent = 0;
        break;
      }
      if (io.bytes == 0) {
        waits = true;
        break;
      }
      account(out, io.bytes);
    }
  }
  return waits ? Progress::idle : Progress::failed;
}

void PipelinedPlan::wait_for(WaitSet& set) const {
  if (failure_) {
    for (const Out& out : outs_) {
      if (out.sent > 0) mesh_.wait_for(out.peer, POLLOUT, set.fds);
    }
    return set.wake_at(give_up_ns_);
  }
  for (const Out& out : outs_) {
    if (out.returned < out.next) mesh_.wait_for(out.peer, 0, set.fds);
    if (out.all_sent()) continue;
    const bool may_send = out.header_sent < sizeof out.header || out.sent > 0 || reached(out.chunks[out.next].after);
    if (may_send) mesh_.wait_for(out.peer, POLLOUT, set.fds);
  }
  for (const In& in : ins_) {
    if (!in.done() && may_read(in)) mesh_.wait_for(in.peer, POLLIN, set.fds);
  }
  set.wake_at(gave_up_timer_.wake_ns());
  if (!gave_up_timer_.has_looked()) return;
  for_each_silent([&](int peer) { mesh_.wait_to_peek(peer, set.fds); });
}

std::vector<int> PipelinedPlan::awaited() const {
  // Ranks that have not begun come first: the other ranks may wait for them too.
  std::vector<int> absent;
  std::vector<int> late;
  for (const In& in : ins_) {
    if (!in.has_header()) {
      absent.push_back(in.peer);
    } else if (!in.done() && reached(in.chunks[in.next].after)) {
      late.push_back(in.peer);
    }
  }
  if (!absent.empty()) return absent;
  if (!late.empty()) return late;
  for (const Out& out : outs_) {
    if (!out.done()) late.push_back(out.peer);
  }
  return late;
}

bool PipelinedPlan::awaited_may_wait() const {
  return std::all_of(ins_.begin(), ins_.end(), [](const In& in) { return in.has_header(); });
}

}  // namespace netfold::collective
