#include <netfold/collective/direct.hpp>
#include <netfold/collective/pipelined_plan.hpp>
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/reduce.hpp>

#include <array>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr std::size_t kMinChunkBytes = 16 << 10;
constexpr std::size_t kMinLongChunkBytes = 64 << 10;
constexpr std::size_t kMaxChunkBytes = 256 << 10;

std::size_t chunks_between(std::size_t block_bytes, std::size_t least, std::size_t least_bytes) {
  const std::size_t wanted = std::clamp(block_bytes / least, least_bytes, kMaxChunkBytes);
  return std::max<std::size_t>(1, (block_bytes + wanted - 1) / wanted);
}

}  // namespace

Span part(Span whole, std::size_t parts, std::size_t index) {
  return {whole.first + whole.count / parts * index + std::min(index, whole.count % parts),
          whole.count / parts + (index < whole.count % parts ? 1 : 0)};
}

std::size_t PipelinedPlan::chunks_of(std::size_t block_bytes) const {
  return mesh_.prefers_large_chunks() ? chunks_between(block_bytes, 2, kMinLongChunkBytes)
                                      : chunks_between(block_bytes, 4, kMinChunkBytes);
}

std::size_t PipelinedPlan::pipeline_chunks_of(std::size_t block_bytes) const {
  return chunks_between(block_bytes, 64, mesh_.prefers_large_chunks() ? kMinLongChunkBytes : kMinChunkBytes);
}

PipelinedPlan::PipelinedPlan(const Call& call, transport::Mesh& mesh, Team team)
    : call_(call),
      mesh_(mesh),
      team_(std::move(team)),
      element_bytes_(kernels::element_bytes(call.dtype)),
      wire_element_bytes_(kernels::element_bytes(call.wire)),
      converts_(call.wire != call.dtype) {}

int PipelinedPlan::to(int position) {
  const int peer = team_.rank(position);
  for (const Out& out : outs_) {
    if (out.peer == peer) return out.stream;
  }
  Out out;
  out.peer = peer;
  out.stream = static_cast<int>(through_.size());
  through_.push_back(0);
  index_.push_back(outs_.size());
  outs_.push_back(std::move(out));
  return outs_.back().stream;
}

int PipelinedPlan::from(int position) {
  const int peer = team_.rank(position);
  for (const In& in : ins_) {
    if (in.peer == peer) return in.stream;
  }
  In in;
  in.peer = peer;
  in.stream = static_cast<int>(through_.size());
  through_.push_back(0);
  index_.push_back(ins_.size());
  ins_.push_back(std::move(in));
  return ins_.back().stream;
}

PipelinedPlan::Mark PipelinedPlan::add(int stream, const Send& chunk) {
  Out& out = outs_[index_[static_cast<std::size_t>(stream)]];
  if (chunk.bytes == 0) return chunk.after;
  out.chunks.push_back(chunk);
  return {stream, out.chunks.size()};
}

PipelinedPlan::Mark PipelinedPlan::add(int stream, const Receive& chunk) {
  In& in = ins_[index_[static_cast<std::size_t>(stream)]];
  if (chunk.bytes == 0) return chunk.after;
  in.chunks.push_back(chunk);
  return {stream, in.chunks.size()};
}

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
    if (in.slots > 1) in.scratch = mesh_.scratch(in.peer, in.slots * in.slot_bytes);
    if (in.scratch == nullptr) in.staging.resize(in.slots * in.slot_bytes);
    in.stage = in.scratch != nullptr ? in.scratch->data() : in.staging.data();
    in.expected = MessageHeader::of(call_, bytes);
    largest = std::max(largest, staged);
  }
  if (converts_) decoded_.resize(largest);
  lease_tensors();
}

// The tensors that direct chunks lie in.
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
  return mark.stream < 0 || through_[static_cast<std::size_t>(mark.stream)] >= mark.chunks;
}

std::size_t PipelinedPlan::wire_bytes_of(std::size_t bytes) const {
  return converts_ ? bytes / element_bytes_ * wire_element_bytes_ : bytes;
}

// The next chunk's values as they travel.
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

// What may go now, header first, in as few socket calls as can be.
std::size_t PipelinedPlan::gather(Out& out, std::span<iovec> parts, std::size_t* bytes) {
  static ChunkMarker marker = ChunkMarker::chunk;  // only ever read
  std::size_t count = 0;
  const auto append = [&](const void* data, std::size_t length, std::size_t skip) {
    if (skip >= length) return;
    parts[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skip, length - skip};
    *bytes += length - skip;
  };
  append(&out.header, sizeof out.header, out.header_sent);
  std::size_t skip = out.sent;
  for (std::size_t i = out.next; i < out.chunks.size() && count + 2 <= parts.size(); ++i) {
    const Send& chunk = out.chunks[i];
    if (skip == 0 && (!reached(chunk.after) || uses_rma(out.peer, chunk.bytes))) break;
    append(&marker, sizeof marker, skip);
    append(converts_ ? encoded(out) : chunk.data, wire_bytes_of(chunk.bytes),
           skip > sizeof marker ? skip - sizeof marker : 0);
    skip = 0;
    if (converts_) break;  // one staging area, one chunk
  }
  return count;
}

// The next chunk, from the memory that it is in.
bool PipelinedPlan::put(Out& out) {
  static ChunkMarker marker = ChunkMarker::chunk;  // only ever read
  const Send& chunk = out.chunks[out.next];
  const iovec parts[2] = {{&marker, sizeof marker}, {chunk.data, chunk.bytes}};
  const auto io = mesh_.put(out.peer, parts, name_of(out.next));
  if (io.closed) note(lost(out.peer, peer_lost(out.peer, io, MessageHeader::of(call_, 0))));
  if (io.bytes > 0) account(out, io.bytes);
  return io.bytes > 0;
}

// Chunks whose memory came back are through.
bool PipelinedPlan::take_back(Out& out) {
  if (out.back == out.next) return false;
  const std::size_t before = out.back;
  const std::size_t begun = out.sent;
  const std::size_t in_flight = std::max(mesh_.bytes_in_flight(out.peer), begun) - begun;
  while (out.back < out.next && out.in_flight > in_flight) {
    out.in_flight -= sizeof(ChunkMarker) + wire_bytes_of(out.chunks[out.back].bytes);
    ++out.back;
  }
  through_[static_cast<std::size_t>(out.stream)] = out.back;
  return out.back > before;
}

bool PipelinedPlan::advance(Out& out) {
  bool moved = take_back(out);
  while (!out.all_sent()) {
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
      note(lost(out.peer, peer_lost(out.peer, io, MessageHeader::of(call_, 0))));
      return moved;
    }
    if (io.bytes == 0) break;
    moved = true;
    account(out, io.bytes);
    if (io.bytes < wanted) break;
  }
  return take_back(out) || moved;
}

void PipelinedPlan::account(Out& out, std::size_t bytes) {
  wire_bytes_ += bytes;
  const std::size_t of_header = std::min(bytes, sizeof out.header - out.header_sent);
  out.header_sent += of_header;
  bytes -= of_header;
  while (bytes > 0) {
    const std::size_t whole = sizeof(ChunkMarker) + wire_bytes_of(out.chunks[out.next].bytes);
    const std::size_t some = std::min(bytes, whole - out.sent);
    out.sent += some;
    bytes -= some;
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

// Whether the next chunk's values may be read: also when all is lost, for the reason that may stand behind them.
bool PipelinedPlan::takes(const In& in) const {
  return in.next < in.chunks.size() && (failure_ || reached(in.chunks[in.next].after));
}

// Whether there is something to read that has a place to go to.
bool PipelinedPlan::reads(const In& in) const {
  if (in.header_got < sizeof in.header || in.unexpected) return true;
  return in.next < in.chunks.size() && (in.got < sizeof in.marker || takes(in));
}

std::byte* PipelinedPlan::target(In& in, std::size_t number) {
  const Receive& chunk = in.chunks[number];
  const bool in_place = chunk.operand == nullptr && !converts_;
  return in_place ? chunk.into : in.stage + number % in.slots * in.slot_bytes;
}

// Whether a chunk's place is one of an earlier chunk that is not stored: read in order, that would not matter.
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

// Of the next chunks, as far as they may be written to.
void PipelinedPlan::name_places(In& in) {
  in.placed = std::max(in.placed, in.next);
  while (in.placed < std::min(in.chunks.size(), in.next + kAhead)) {
    const Receive& chunk = in.chunks[in.placed];
    if (uses_rma(in.peer, chunk.bytes)) {
      if (!reached(chunk.after) || overlaps(in, in.placed)) return;
      if (!mesh_.post_receive(in.peer, name_of(in.placed), target(in, in.placed), chunk.bytes)) return;
    }
    ++in.placed;
  }
}

bool PipelinedPlan::advance(In& in) {
  if (in.unexpected) return read_abort(in, {});
  if (!failure_) name_places(in);
  bool moved = false;
  while (!in.done() && reads(in)) {
    std::array<iovec, 3> parts;
    std::size_t count = 0;
    std::size_t wanted = 0;
    const auto append = [&](void* data, std::size_t bytes) {
      if (bytes > 0) parts[count++] = {data, bytes};
      wanted += bytes;
    };
    append(reinterpret_cast<std::byte*>(&in.header) + in.header_got, sizeof in.header - in.header_got);
    std::size_t whole = 0;
    std::byte* into = nullptr;
    if (in.next < in.chunks.size()) {
      const Receive& chunk = in.chunks[in.next];
      whole = sizeof in.marker + wire_bytes_of(chunk.bytes);
      into = target(in, in.next);
      const std::size_t of_marker = std::min(in.got, sizeof in.marker);
      append(reinterpret_cast<std::byte*>(&in.marker) + of_marker, sizeof in.marker - of_marker);
      const std::size_t of_values = in.got - of_marker;
      if (takes(in)) append(into + of_values, whole - sizeof in.marker - of_values);
    }
    const auto io = mesh_.receive(in.peer, {parts.data(), count});
    if (io.closed) {
      note(peer_lost(in.peer, io, MessageHeader::of(call_, 0)));
      return moved;
    }
    if (io.bytes == 0) break;
    moved = true;
    const std::size_t of_header = std::min(io.bytes, sizeof in.header - in.header_got);
    in.header_got += of_header;
    in.got += io.bytes - of_header;
    if (in.header_got < sizeof in.header) break;
    const std::size_t values = in.got > sizeof in.marker ? in.got - sizeof in.marker : 0;
    if (of_header > 0 && std::memcmp(&in.header, &in.expected, sizeof in.header) != 0) {
      std::vector<std::byte> early(sizeof in.header + in.got);
      std::memcpy(early.data(), &in.header, sizeof in.header);
      std::memcpy(early.data() + sizeof in.header, &in.marker, in.got - values);
      if (values > 0) std::memcpy(early.data() + sizeof in.header + sizeof in.marker, into, values);
      return read_abort(in, early);
    }
    if (in.got >= sizeof in.marker && in.marker != ChunkMarker::chunk) return read_abort(in, {into, values});
    if (in.next < in.chunks.size() && in.got == whole) {
      if (!failure_) store(in);
      in.got = 0;
      received_bytes_ += whole;
      through_[static_cast<std::size_t>(in.stream)] = ++in.next;
      if (!failure_) name_places(in);
      // Let what has become possible leave before more is read.
      push();
    }
    if (io.bytes < wanted) break;  // the socket had no more
  }
  return moved;
}

// Another header than was expected, or the reason why the stream ends; all of it may not be here yet.
bool PipelinedPlan::read_abort(In& in, std::span<const std::byte> early) {
  if (!in.unexpected) in.unexpected.emplace(call_, in.peer, in.expected.bytes, early);
  Failure heard;
  while (!heard && in.unexpected->advance(mesh_, heard) > 0) {
  }
  if (heard) note(std::move(heard));
  return true;
}

void PipelinedPlan::store(In& in) {
  const Receive& chunk = in.chunks[in.next];
  const std::size_t count = chunk.bytes / element_bytes_;
  if (chunk.operand == nullptr) {
    if (converts_) kernels::convert(call_.dtype, chunk.into, call_.wire, in.staging.data(), count);
    return;  // else it was received in place
  }
  const std::byte* arrived = target(in, in.next);
  if (converts_) {
    kernels::convert(call_.dtype, decoded_.data(), call_.wire, arrived, count);
    arrived = decoded_.data();
  }
  const void* sources[2] = {chunk.operand, arrived};
  if (chunk.arrived_first) std::swap(sources[0], sources[1]);
  kernels::reduce(call_.reduce, call_.dtype, chunk.into, sources, 2, count);
}

// The first failure counts, but what another rank says is worth more than a broken connection.
void PipelinedPlan::note(Failure failure) {
  const bool first_hand = failure_.kind == Failure::Kind::peer_lost && failure_.remote_reason.empty();
  const bool says_more = !failure.remote_reason.empty() || failure.kind == Failure::Kind::mismatch;
  if (!failure_ || (first_hand && says_more)) failure_ = std::move(failure);
}

Failure PipelinedPlan::lost(int peer, Failure failure) {
  for (const In& in : ins_) {
    if (in.peer == peer && !in.done()) return failure;  // its last words come in that stream
  }
  return read_last_abort(mesh_, peer, call_, std::move(failure));
}

Progress PipelinedPlan::poll(std::int64_t now_ns) {
  if (failure_) return finish_chunks(now_ns);
  bool moved = push();
  if (!begun_) {
    begun_ = true;
    after_first_sends();
  }
  if (!failure_ || failure_.kind == Failure::Kind::peer_lost) {
    for (In& in : ins_) {
      if (!in.done()) moved |= advance(in);
    }
  }
  if (failure_) return finish_chunks(now_ns);
  const auto done = [](const auto& stream) { return stream.done(); };
  if (std::all_of(outs_.begin(), outs_.end(), done) && std::all_of(ins_.begin(), ins_.end(), done)) {
    const bool has_result = call_.kind != Kind::reduce || team_.position() == call_.root;
    if (call_.average && has_result) divide(call_.dtype, call_.outputs[0], team_.size());
    finish();
    registrations_ = tensor_registrations_.registrations();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::idle;
}

// A peer can be told why only where a chunk ends.
Progress PipelinedPlan::finish_chunks(std::int64_t now_ns) {
  if (give_up_ns_ < 0) give_up_ns_ = now_ns + kLastChunkNs;
  bool waits = false;
  for (Out& out : outs_) {
    while (out.sent > 0 && mesh_.leads_to(out.peer) && now_ns < give_up_ns_) {
      static ChunkMarker marker = ChunkMarker::chunk;
      const Send& chunk = out.chunks[out.next];
      const std::size_t of_marker = std::min(out.sent, sizeof marker);
      const std::byte* values = converts_ ? out.staging.data() : chunk.data;
      const std::size_t of_values = out.sent - of_marker;
      const iovec parts[2] = {{reinterpret_cast<std::byte*>(&marker) + of_marker, sizeof marker - of_marker},
                              {const_cast<std::byte*>(values) + of_values, wire_bytes_of(chunk.bytes) - of_values}};
      const auto io = mesh_.send(out.peer, parts);
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
    if (out.back < out.next) mesh_.wait_for(out.peer, 0, set.fds);
    if (out.all_sent()) continue;
    const bool may_send = out.header_sent < sizeof out.header || out.sent > 0 || reached(out.chunks[out.next].after);
    if (may_send) mesh_.wait_for(out.peer, POLLOUT, set.fds);
  }
  for (const In& in : ins_) {
    if (!in.done() && reads(in)) mesh_.wait_for(in.peer, POLLIN, set.fds);
  }
}

std::vector<int> PipelinedPlan::awaited() const {
  // Who has not begun comes first: the others may be waiting for it as well.
  std::vector<int> absent;
  std::vector<int> late;
  for (const In& in : ins_) {
    if (in.header_got < sizeof in.header) {
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
  return std::all_of(ins_.begin(), ins_.end(), [](const In& in) { return in.header_got == sizeof in.header; });
}

}  // namespace netfold::collective
