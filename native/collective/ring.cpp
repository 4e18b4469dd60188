#include <netfold/collective/direct.hpp>
#include <netfold/collective/ring.hpp>
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <utility>

namespace netfold::collective {
namespace {

// A piece's word and its values, as far as they have not gone or come yet.
class Parts {
 public:
  Parts(PieceWord& word, std::byte* values, std::size_t bytes, std::size_t done) {
    const std::size_t of_word = std::min(done, sizeof word);
    parts_[0] = {reinterpret_cast<std::byte*>(&word) + of_word, sizeof word - of_word};
    parts_[1] = {values + (done - of_word), bytes - (done - of_word)};
    first_ = of_word == sizeof word ? 1 : 0;
  }
  std::span<const iovec> left() const { return std::span(parts_).subspan(first_); }

 private:
  iovec parts_[2];
  std::size_t first_;
};

}  // namespace

Ring::Ring(const Call& call, transport::Mesh& mesh)
    : call_(call),
      mesh_(mesh),
      ranks_(mesh.size()),
      next_((mesh.rank() + 1) % mesh.size()),
      previous_((mesh.rank() + mesh.size() - 1) % mesh.size()),
      element_bytes_(kernels::element_bytes(call.dtype)),
      wire_element_bytes_(kernels::element_bytes(call.wire)) {
  const std::size_t block = (call.elements() + static_cast<std::size_t>(ranks_) - 1) / static_cast<std::size_t>(ranks_);
  const std::size_t per_sub_block = kSubBlockBytes / element_bytes_;
  sub_blocks_ = std::max<std::size_t>(1, (block + per_sub_block - 1) / per_sub_block);
  total_ = 2 * static_cast<std::size_t>(ranks_ - 1) * sub_blocks_;
  const std::size_t piece_elements = (block + sub_blocks_ - 1) / sub_blocks_ + 1;
  receive_staging_.resize(piece_elements * wire_element_bytes_);
  if (call.wire != call.dtype) {
    send_staging_.resize(piece_elements * wire_element_bytes_);
    decoded_.resize(piece_elements * element_bytes_);
  }
  send_header_ = Outgoing::stream(call, next_, stream_bytes(mesh.rank()));
  receive_header_ = IncomingHeader(call, previous_, stream_bytes(previous_));
}

Ring::Piece Ring::piece(std::size_t index, int rank) const {
  const auto ranks = static_cast<std::size_t>(ranks_);
  const std::size_t step = index / sub_blocks_;
  const std::size_t sub = index % sub_blocks_;
  const std::size_t block = (static_cast<std::size_t>(rank) + 2 * ranks - step % ranks) % ranks;
  const std::size_t n = call_.elements();
  // Blocks and sub-blocks by proportion: sizes differ by one at most.
  const std::size_t block_first = n / ranks * block + std::min(block, n % ranks);
  const std::size_t block_count = n / ranks + (block < n % ranks ? 1 : 0);
  const std::size_t first = block_count / sub_blocks_ * sub + std::min(sub, block_count % sub_blocks_);
  const std::size_t count = block_count / sub_blocks_ + (sub < block_count % sub_blocks_ ? 1 : 0);
  return {block_first + first, count};
}

std::size_t Ring::stream_bytes(int rank) const {
  std::size_t elements = 0;
  for (std::size_t step = 0; step < total_ / sub_blocks_; ++step) {
    for (std::size_t sub = 0; sub < sub_blocks_; ++sub) elements += piece(step * sub_blocks_ + sub, rank).count;
  }
  return elements * wire_element_bytes_ + total_ * sizeof(PieceWord);
}

void Ring::load_send() {
  const Piece what = piece(sent_pieces_, mesh_.rank());
  std::byte* data = call_.outputs[0].data + what.first * element_bytes_;
  send_piece_bytes_ = what.count * wire_element_bytes_;
  if (call_.wire == call_.dtype) {
    send_at_ = data;
  } else {
    kernels::convert(call_.wire, send_staging_.data(), call_.dtype, data, what.count);
    // The finished block leaves its owner here: keep what the others will get.
    if (sent_pieces_ / sub_blocks_ == static_cast<std::size_t>(ranks_ - 1)) {
      kernels::convert(call_.dtype, data, call_.wire, send_staging_.data(), what.count);
    }
    send_at_ = send_staging_.data();
  }
  sent_bytes_ = 0;
  send_loaded_ = true;
}

bool Ring::advance_send() {
  bool moved = false;
  if (failure_) return moved;
  if (!send_header_.done()) {
    const std::size_t bytes = send_header_.advance(mesh_, failure_);
    wire_bytes_ += bytes;
    moved = bytes > 0;
    if (failure_) failure_ = next_lost(std::move(failure_));
    if (failure_ || !send_header_.done()) return moved;
  }
  // The first step sends this rank's own block; sub-block i of later steps is what was received as i - S.
  while (sent_pieces_ < total_ && sent_pieces_ < sub_blocks_ + received_pieces_) {
    if (!send_loaded_) load_send();
    const auto io = send_piece();
    if (io.closed) {
      failure_ = next_lost(peer_lost(next_, io, MessageHeader::of(call_, 0)));
      return moved;
    }
    if (io.bytes == 0) return moved;
    moved = true;
    if (sent_bytes_ == sizeof(PieceWord) + send_piece_bytes_) {
      ++sent_pieces_;
      send_loaded_ = false;
    }
  }
  if (sent_pieces_ == total_) mesh_.set_place(next_, transport::Mesh::Place::between_messages);
  return moved;
}

Failure Ring::next_lost(Failure lost) {
  // Between two ranks the other's stream comes on the same connection: it is read as such.
  return ranks_ == 2 ? lost : last_words(mesh_, next_, call_, std::move(lost));
}

transport::Mesh::Io Ring::send_piece() {
  using Place = transport::Mesh::Place;
  auto word = PieceWord::piece;
  const Parts parts(word, const_cast<std::byte*>(send_at_), send_piece_bytes_, sent_bytes_);
  const auto io = mesh_.send(next_, parts.left());
  sent_bytes_ += io.bytes;
  wire_bytes_ += io.bytes;
  const bool inside = sent_bytes_ > 0 && sent_bytes_ < sizeof word + send_piece_bytes_;
  mesh_.set_place(next_, inside ? Place::inside : Place::between_pieces);
  return io;
}

void Ring::store_received() {
  const Piece what = piece(received_pieces_, previous_);
  std::byte* data = call_.outputs[0].data + what.first * element_bytes_;
  const bool reducing = received_pieces_ / sub_blocks_ < static_cast<std::size_t>(ranks_ - 1);
  if (!reducing) {
    if (call_.wire != call_.dtype) {
      kernels::convert(call_.dtype, data, call_.wire, receive_staging_.data(), what.count);
    }
    return;  // else it was received in place
  }
  const std::byte* arrived = receive_staging_.data();
  if (call_.wire != call_.dtype) {
    kernels::convert(call_.dtype, decoded_.data(), call_.wire, receive_staging_.data(), what.count);
    arrived = decoded_.data();
  }
  const void* sources[2] = {arrived, data};
  kernels::reduce(call_.reduce, call_.dtype, data, sources, 2, what.count);
}

bool Ring::advance_receive() {
  bool moved = false;
  if (!receive_header_.done()) {
    Failure heard;
    moved = receive_header_.advance(mesh_, heard) > 0;
    if (heard) failure_ = std::move(heard);
    if (failure_ || !receive_header_.done()) return moved;
  }
  while (received_pieces_ < total_) {
    const Piece what = piece(received_pieces_, previous_);
    const std::size_t bytes = what.count * wire_element_bytes_;
    const bool in_place =
        call_.wire == call_.dtype && received_pieces_ / sub_blocks_ >= static_cast<std::size_t>(ranks_ - 1);
    std::byte* into = in_place ? call_.outputs[0].data + what.first * element_bytes_ : receive_staging_.data();
    const Parts parts(word_, into, bytes, received_bytes_);
    const auto io = mesh_.receive(previous_, parts.left());
    if (io.closed) {
      failure_ = peer_lost(previous_, io, MessageHeader::of(call_, 0));
      return moved;
    }
    if (io.bytes == 0) return moved;
    moved = true;
    received_bytes_ += io.bytes;
    if (received_bytes_ >= sizeof word_ && word_ != PieceWord::piece) {
      receive_header_ = IncomingHeader::abort(call_, previous_, {into, received_bytes_ - sizeof word_});
      Failure heard;
      while (!heard && receive_header_.advance(mesh_, heard) > 0) {
      }
      if (heard) failure_ = std::move(heard);
      return moved;
    }
    if (received_bytes_ == sizeof word_ + bytes) {
      store_received();
      ++received_pieces_;
      received_bytes_ = 0;
      // Let what was just reduced leave before more is read.
      advance_send();
      if (failure_) return moved;
    }
  }
  return moved;
}

Progress Ring::poll(std::int64_t now_ns) {
  if (failure_) return finish_piece(now_ns);
  bool moved = advance_send();
  if (!failure_ || failure_.kind == Failure::Kind::peer_lost) moved |= advance_receive();
  if (failure_) return finish_piece(now_ns);
  if (sent_pieces_ == total_ && received_pieces_ == total_) {
    if (call_.average) divide(call_.dtype, call_.outputs[0], ranks_);
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::idle;
}

// The next rank can be told why only where a piece ends.
Progress Ring::finish_piece(std::int64_t now_ns) {
  if (give_up_ns_ < 0) give_up_ns_ = now_ns + kLastPieceNs;
  while (mesh_.place(next_) == transport::Mesh::Place::inside && send_header_.done() && now_ns < give_up_ns_) {
    const auto io = send_piece();
    if (io.closed) break;
    if (io.bytes == 0) return Progress::idle;
  }
  return Progress::failed;
}

void Ring::wait_for(WaitSet& set) const {
  if (failure_) {
    set.add(mesh_.fd(next_), POLLOUT);
    return set.wake_at(give_up_ns_);
  }
  const bool can_send =
      !send_header_.done() || (sent_pieces_ < total_ && sent_pieces_ < sub_blocks_ + received_pieces_);
  if (can_send) set.add(mesh_.fd(next_), POLLOUT);
  if (received_pieces_ < total_) set.add(mesh_.fd(previous_), POLLIN);
}

std::vector<int> Ring::awaited() const { return {received_pieces_ < total_ ? previous_ : next_}; }

}  // namespace netfold::collective
