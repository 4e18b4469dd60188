#include <netfold/collective/direct.hpp>
#include <netfold/collective/streams.hpp>
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/reduce.hpp>

#include <array>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr std::size_t kMinPieceBytes = 16 << 10;
constexpr std::size_t kMinLongPieceBytes = 64 << 10;
constexpr std::size_t kMaxPieceBytes = 256 << 10;

std::size_t pieces_between(std::size_t block_bytes, std::size_t least, std::size_t least_bytes) {
  const std::size_t wanted = std::clamp(block_bytes / least, least_bytes, kMaxPieceBytes);
  return std::max<std::size_t>(1, (block_bytes + wanted - 1) / wanted);
}

}  // namespace

Span part(Span whole, std::size_t parts, std::size_t index) {
  return {whole.first + whole.count / parts * index + std::min(index, whole.count % parts),
          whole.count / parts + (index < whole.count % parts ? 1 : 0)};
}

std::size_t Streams::pieces_of(std::size_t block_bytes) const {
  return mesh_.likes_long_pieces() ? pieces_between(block_bytes, 2, kMinLongPieceBytes)
                                   : pieces_between(block_bytes, 4, kMinPieceBytes);
}

std::size_t Streams::pipeline_pieces_of(std::size_t block_bytes) const {
  return pieces_between(block_bytes, 64, mesh_.likes_long_pieces() ? kMinLongPieceBytes : kMinPieceBytes);
}

Streams::Streams(const Call& call, transport::Mesh& mesh, Team team)
    : call_(call),
      mesh_(mesh),
      team_(std::move(team)),
      element_bytes_(kernels::element_bytes(call.dtype)),
      wire_element_bytes_(kernels::element_bytes(call.wire)),
      converts_(call.wire != call.dtype) {}

int Streams::to(int position) {
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

int Streams::from(int position) {
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

Streams::Mark Streams::add(int stream, const Send& piece) {
  Out& out = outs_[index_[static_cast<std::size_t>(stream)]];
  if (piece.bytes == 0) return piece.after;
  out.pieces.push_back(piece);
  return {stream, out.pieces.size()};
}

Streams::Mark Streams::add(int stream, const Receive& piece) {
  In& in = ins_[index_[static_cast<std::size_t>(stream)]];
  if (piece.bytes == 0) return piece.after;
  in.pieces.push_back(piece);
  return {stream, in.pieces.size()};
}

void Streams::finish_plan() {
  std::size_t largest = 0;
  for (Out& out : outs_) {
    std::size_t bytes = 0;
    std::size_t longest = 0;
    for (const Send& piece : out.pieces) {
      bytes += sizeof(PieceWord) + wire_bytes_of(piece.bytes);
      longest = std::max(longest, piece.bytes);
    }
    if (converts_) out.staging.resize(wire_bytes_of(longest));
    out.header = MessageHeader::of(call_, bytes);
  }
  for (In& in : ins_) {
    std::size_t bytes = 0;
    std::size_t staged = 0;
    for (const Receive& piece : in.pieces) {
      bytes += sizeof(PieceWord) + wire_bytes_of(piece.bytes);
      if (piece.fold != nullptr || converts_) staged = std::max(staged, piece.bytes);
    }
    in.slot_bytes = wire_bytes_of(staged);
    in.slots = is_direct(in.peer, staged) ? kAhead : 1;
    if (in.slots > 1) in.scratch = mesh_.scratch(in.peer, in.slots * in.slot_bytes);
    if (in.scratch == nullptr) in.staging.resize(in.slots * in.slot_bytes);
    in.stage = in.scratch != nullptr ? in.scratch->data() : in.staging.data();
    in.expected = MessageHeader::of(call_, bytes);
    largest = std::max(largest, staged);
  }
  if (converts_) decoded_.resize(largest);
  hold();
}

// The tensors that direct pieces lie in.
void Streams::hold() {
  const auto any = [&](const auto& streams) {
    return std::any_of(streams.begin(), streams.end(), [&](const auto& stream) {
      return std::any_of(stream.pieces.begin(), stream.pieces.end(),
                         [&](const auto& piece) { return is_direct(stream.peer, piece.bytes); });
    });
  };
  if (any(outs_) || any(ins_)) borrowed_.hold(call_, mesh_);
}

bool Streams::reached(const Mark& mark) const {
  return mark.stream < 0 || through_[static_cast<std::size_t>(mark.stream)] >= mark.pieces;
}

std::size_t Streams::wire_bytes_of(std::size_t bytes) const {
  return converts_ ? bytes / element_bytes_ * wire_element_bytes_ : bytes;
}

// The next piece's values as they travel.
const std::byte* Streams::encoded(Out& out) {
  const Send& piece = out.pieces[out.next];
  if (!out.encoded) {
    const std::size_t count = piece.bytes / element_bytes_;
    kernels::convert(call_.wire, out.staging.data(), call_.dtype, piece.data, count);
    if (piece.finished) kernels::convert(call_.dtype, piece.data, call_.wire, out.staging.data(), count);
    out.encoded = true;
  }
  return out.staging.data();
}

// What may go now, header first, in as few socket calls as can be.
std::size_t Streams::gather(Out& out, std::span<iovec> parts, std::size_t* bytes) {
  static PieceWord word = PieceWord::piece;  // only ever read
  std::size_t count = 0;
  const auto append = [&](const void* data, std::size_t length, std::size_t skip) {
    if (skip >= length) return;
    parts[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skip, length - skip};
    *bytes += length - skip;
  };
  append(&out.header, sizeof out.header, out.header_sent);
  std::size_t skip = out.sent;
  for (std::size_t i = out.next; i < out.pieces.size() && count + 2 <= parts.size(); ++i) {
    const Send& piece = out.pieces[i];
    if (skip == 0 && (!reached(piece.after) || is_direct(out.peer, piece.bytes))) break;
    append(&word, sizeof word, skip);
    append(converts_ ? encoded(out) : piece.data, wire_bytes_of(piece.bytes),
           skip > sizeof word ? skip - sizeof word : 0);
    skip = 0;
    if (converts_) break;  // one staging area, one piece
  }
  return count;
}

// The next piece, from the memory that it is in.
bool Streams::lend(Out& out) {
  static PieceWord word = PieceWord::piece;  // only ever read
  const Send& piece = out.pieces[out.next];
  const iovec parts[2] = {{&word, sizeof word}, {piece.data, piece.bytes}};
  const auto io = mesh_.lend(out.peer, parts, name_of(out.next));
  if (io.closed) note(lost(out.peer, peer_lost(out.peer, io, MessageHeader::of(call_, 0))));
  if (io.bytes > 0) account(out, io.bytes);
  return io.bytes > 0;
}

// Pieces whose memory came back are through.
bool Streams::take_back(Out& out) {
  if (out.back == out.next) return false;
  const std::size_t before = out.back;
  const std::size_t begun = out.sent;
  const std::size_t lent = std::max(mesh_.lent(out.peer), begun) - begun;
  while (out.back < out.next && out.lent > lent) {
    out.lent -= sizeof(PieceWord) + wire_bytes_of(out.pieces[out.back].bytes);
    ++out.back;
  }
  through_[static_cast<std::size_t>(out.stream)] = out.back;
  return out.back > before;
}

bool Streams::advance(Out& out) {
  bool moved = take_back(out);
  while (!out.all_sent()) {
    const bool is_next = out.header_sent == sizeof out.header && out.sent == 0;
    if (is_next && is_direct(out.peer, out.pieces[out.next].bytes)) {
      if (!reached(out.pieces[out.next].after) || !lend(out)) break;
      moved = true;
      continue;
    }
    std::array<iovec, 1 + 2 * kBatchPieces> parts;
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

void Streams::account(Out& out, std::size_t bytes) {
  wire_bytes_ += bytes;
  const std::size_t of_header = std::min(bytes, sizeof out.header - out.header_sent);
  out.header_sent += of_header;
  bytes -= of_header;
  while (bytes > 0) {
    const std::size_t whole = sizeof(PieceWord) + wire_bytes_of(out.pieces[out.next].bytes);
    const std::size_t some = std::min(bytes, whole - out.sent);
    out.sent += some;
    bytes -= some;
    if (out.sent < whole) break;
    out.sent = 0;
    out.encoded = false;
    out.lent += whole;
    ++out.next;
  }
  using Place = transport::Mesh::Place;
  const bool inside = out.sent > 0 || out.header_sent < sizeof out.header;
  mesh_.set_place(out.peer, inside ? Place::inside : out.all_sent() ? Place::between_messages : Place::between_pieces);
}

bool Streams::push() {
  bool moved = false;
  for (Out& out : outs_) {
    if (failure_) break;
    if (!out.done()) moved |= advance(out);
  }
  return moved;
}

// Whether the next piece's values may be read: also when all is lost, for the reason that may stand behind them.
bool Streams::takes(const In& in) const {
  return in.next < in.pieces.size() && (failure_ || reached(in.pieces[in.next].after));
}

// Whether there is something to read that has a place to go to.
bool Streams::reads(const In& in) const {
  if (in.header_got < sizeof in.header || in.strange) return true;
  return in.next < in.pieces.size() && (in.got < sizeof in.word || takes(in));
}

std::byte* Streams::target(In& in, std::size_t number) {
  const Receive& piece = in.pieces[number];
  const bool in_place = piece.fold == nullptr && !converts_;
  return in_place ? piece.into : in.stage + number % in.slots * in.slot_bytes;
}

// Whether a piece's place is one of an earlier piece that is not stored: read in order, that would not matter.
bool Streams::overlaps(const In& in, std::size_t number) const {
  const Receive& piece = in.pieces[number];
  const auto meets = [&](const std::byte* other, std::size_t bytes) {
    return other != nullptr && piece.into < other + bytes && other < piece.into + piece.bytes;
  };
  for (std::size_t i = in.next; i < number && piece.fold == nullptr; ++i) {
    const Receive& earlier = in.pieces[i];
    if (meets(earlier.into, earlier.bytes) || meets(earlier.fold, earlier.bytes)) return true;
  }
  return false;
}

// Of the next pieces, as far as they may be written to.
void Streams::name_places(In& in) {
  in.placed = std::max(in.placed, in.next);
  while (in.placed < std::min(in.pieces.size(), in.next + kAhead)) {
    const Receive& piece = in.pieces[in.placed];
    if (is_direct(in.peer, piece.bytes)) {
      if (!reached(piece.after) || overlaps(in, in.placed)) return;
      if (!mesh_.expect(in.peer, name_of(in.placed), target(in, in.placed), piece.bytes)) return;
    }
    ++in.placed;
  }
}

bool Streams::advance(In& in) {
  if (in.strange) return hear(in, {});
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
    if (in.next < in.pieces.size()) {
      const Receive& piece = in.pieces[in.next];
      whole = sizeof in.word + wire_bytes_of(piece.bytes);
      into = target(in, in.next);
      const std::size_t of_word = std::min(in.got, sizeof in.word);
      append(reinterpret_cast<std::byte*>(&in.word) + of_word, sizeof in.word - of_word);
      const std::size_t of_values = in.got - of_word;
      if (takes(in)) append(into + of_values, whole - sizeof in.word - of_values);
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
    const std::size_t values = in.got > sizeof in.word ? in.got - sizeof in.word : 0;
    if (of_header > 0 && std::memcmp(&in.header, &in.expected, sizeof in.header) != 0) {
      std::vector<std::byte> early(sizeof in.header + in.got);
      std::memcpy(early.data(), &in.header, sizeof in.header);
      std::memcpy(early.data() + sizeof in.header, &in.word, in.got - values);
      if (values > 0) std::memcpy(early.data() + sizeof in.header + sizeof in.word, into, values);
      return hear(in, early);
    }
    if (in.got >= sizeof in.word && in.word != PieceWord::piece) return hear(in, {into, values});
    if (in.next < in.pieces.size() && in.got == whole) {
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
bool Streams::hear(In& in, std::span<const std::byte> early) {
  if (!in.strange) in.strange.emplace(call_, in.peer, in.expected.bytes, early);
  Failure heard;
  while (!heard && in.strange->advance(mesh_, heard) > 0) {
  }
  if (heard) note(std::move(heard));
  return true;
}

void Streams::store(In& in) {
  const Receive& piece = in.pieces[in.next];
  const std::size_t count = piece.bytes / element_bytes_;
  if (piece.fold == nullptr) {
    if (converts_) kernels::convert(call_.dtype, piece.into, call_.wire, in.staging.data(), count);
    return;  // else it was received in place
  }
  const std::byte* arrived = target(in, in.next);
  if (converts_) {
    kernels::convert(call_.dtype, decoded_.data(), call_.wire, arrived, count);
    arrived = decoded_.data();
  }
  const void* sources[2] = {piece.fold, arrived};
  if (piece.arrived_first) std::swap(sources[0], sources[1]);
  kernels::reduce(call_.reduce, call_.dtype, piece.into, sources, 2, count);
}

// The first failure counts, but what another rank says is worth more than a broken connection.
void Streams::note(Failure failure) {
  const bool first_hand = failure_.kind == Failure::Kind::peer_lost && failure_.heard.empty();
  const bool says_more = !failure.heard.empty() || failure.kind == Failure::Kind::mismatch;
  if (!failure_ || (first_hand && says_more)) failure_ = std::move(failure);
}

Failure Streams::lost(int peer, Failure failure) {
  for (const In& in : ins_) {
    if (in.peer == peer && !in.done()) return failure;  // its last words come in that stream
  }
  return last_words(mesh_, peer, call_, std::move(failure));
}

Progress Streams::poll(std::int64_t now_ns) {
  if (failure_) return finish_pieces(now_ns);
  bool moved = push();
  if (!begun_) {
    begun_ = true;
    meanwhile();
  }
  if (!failure_ || failure_.kind == Failure::Kind::peer_lost) {
    for (In& in : ins_) {
      if (!in.done()) moved |= advance(in);
    }
  }
  if (failure_) return finish_pieces(now_ns);
  const auto done = [](const auto& stream) { return stream.done(); };
  if (std::all_of(outs_.begin(), outs_.end(), done) && std::all_of(ins_.begin(), ins_.end(), done)) {
    const bool has_result = call_.kind != Kind::reduce || team_.position() == call_.root;
    if (call_.average && has_result) divide(call_.dtype, call_.outputs[0], team_.size());
    finish();
    registrations_ = borrowed_.registrations();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::idle;
}

// A peer can be told why only where a piece ends.
Progress Streams::finish_pieces(std::int64_t now_ns) {
  if (give_up_ns_ < 0) give_up_ns_ = now_ns + kLastPieceNs;
  bool waits = false;
  for (Out& out : outs_) {
    while (out.sent > 0 && mesh_.leads_to(out.peer) && now_ns < give_up_ns_) {
      static PieceWord word = PieceWord::piece;
      const Send& piece = out.pieces[out.next];
      const std::size_t of_word = std::min(out.sent, sizeof word);
      const std::byte* values = converts_ ? out.staging.data() : piece.data;
      const std::size_t of_values = out.sent - of_word;
      const iovec parts[2] = {{reinterpret_cast<std::byte*>(&word) + of_word, sizeof word - of_word},
                              {const_cast<std::byte*>(values) + of_values, wire_bytes_of(piece.bytes) - of_values}};
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

void Streams::wait_for(WaitSet& set) const {
  if (failure_) {
    for (const Out& out : outs_) {
      if (out.sent > 0) mesh_.wait_for(out.peer, POLLOUT, set.fds);
    }
    return set.wake_at(give_up_ns_);
  }
  for (const Out& out : outs_) {
    if (out.back < out.next) mesh_.wait_for(out.peer, 0, set.fds);
    if (out.all_sent()) continue;
    const bool may_send = out.header_sent < sizeof out.header || out.sent > 0 || reached(out.pieces[out.next].after);
    if (may_send) mesh_.wait_for(out.peer, POLLOUT, set.fds);
  }
  for (const In& in : ins_) {
    if (!in.done() && reads(in)) mesh_.wait_for(in.peer, POLLIN, set.fds);
  }
}

std::vector<int> Streams::awaited() const {
  // Who has not begun comes first: the others may be waiting for it as well.
  std::vector<int> absent;
  std::vector<int> late;
  for (const In& in : ins_) {
    if (in.header_got < sizeof in.header) {
      absent.push_back(in.peer);
    } else if (!in.done() && reached(in.pieces[in.next].after)) {
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

bool Streams::awaited_may_wait() const {
  return std::all_of(ins_.begin(), ins_.end(), [](const In& in) { return in.header_got == sizeof in.header; });
}

}  // namespace netfold::collective
