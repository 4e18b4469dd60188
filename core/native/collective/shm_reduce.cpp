// Reductions among ranks that share memory: all_reduce, reduce, reduce_scatter. All add in rank order.
//
// Few bytes (n <= 16 KB): one step. Every rank posts its n bytes and reduces all P posts.
// More bytes: rank d reduces part d of every round from all ranks' slots. Except in reduce_scatter, it passes the
// result through its own slots to the ranks that need it. Steps: 3 a round of 256 KB (contributions, results, taken).
// More bytes, with every rank's tensor in shared memory: rank d reduces part d of the tensors in place and writes the
// result straight into every rank's tensor. Two steps.
// Many bytes, where ranks may read each other's memory: the same, with the kernel's copies between processes. Rank d
// reads its part of each tensor in chunks that stay in its L2 cache, reduces them, and writes the result to each rank
// while the chunk is cached. One step more: all ranks tell whether they can read all tensors; otherwise the tensors go
// through slots.
//
// Bytes on the wire: none. Memory traffic a rank of P in an all_reduce, in place or by address: n read and n written. In
// slots, which leave the L2 cache before they are used again: 2n read and written, and what plain stores read first.
#include <netfold/collective/reduction.hpp>

#include <algorithm>
#include <cstring>

#include "algorithms.hpp"
#include "shm_in_place.hpp"

namespace netfold::collective {
namespace {

constexpr auto kContributions = transport::ShmNode::Stream::to_reduce;
constexpr auto kResults = transport::ShmNode::Stream::to_copy;
// Tensors of so many bytes are read and written by address. Through slots a rank waits three times a round; by address
// it waits three times in all, but the kernel looks up every page. Measured by lab/bench/by_address.py.
constexpr std::size_t kAllByAddress = 4 << 20;      // all_reduce, reduce
constexpr std::size_t kScatterByAddress = 8 << 20;  // reduce_scatter: only the reading saves anything

class ShmReduce final : public ShmInPlace {
 public:
  ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
      : ShmInPlace(call, mesh, node),
        reduction_(call, node),
        collected_(index(node.size())),
        sources_(index(node.size())) {
    own_.rounds = rounds_for(call.outputs[0]);
  }

 private:
  // The bytes that `position` reduces in a round.
  struct Part {
    std::size_t in_slot = 0;
    std::byte* data = nullptr;  // of this rank's contribution
    std::size_t bytes = 0;
  };
  Part part(std::uint32_t round, int position) const {
    if (has_table()) {
      const Buffer& input = call_.inputs[index(position)];
      const std::size_t first = std::min(input.bytes, part_bytes_ * round);
      return {part_bytes_ * index(position), input.data + first, std::min(part_bytes_, input.bytes - first)};
    }
    const Buffer& tensor = call_.outputs[0];
    const std::size_t first = Node::kSlotBytes * round;
    const std::size_t bytes = std::min(Node::kSlotBytes, tensor.bytes - first);
    const std::size_t share = share_bytes(bytes);
    const std::size_t in_slot = std::min(bytes, share * index(position));
    return {in_slot, tensor.data + first + in_slot, std::min(share, bytes - in_slot)};
  }

  // Whether reads and writes by address take less time than slots, where both are possible.
  bool pays_by_address() const {
    return node_.memory() != nullptr && call_.choice_bytes() >= (has_results() ? kAllByAddress : kScatterByAddress);
  }
  bool has_results() const { return call_.kind != Kind::reduce_scatter; }
  bool wants_results() const { return call_.kind == Kind::all_reduce || (has_results() && self_ == call_.root); }
  void reduce_sources(std::byte* into, std::size_t bytes) {
    reduction_.reduce(into, sources_, bytes / kernels::element_bytes(call_.dtype));
  }

  void reduce_posts() {
    const bool is_idle = call_.kind == Kind::reduce && self_ != call_.root;
    const Buffer& out = call_.outputs[0];
    if (is_idle || out.bytes == 0) return;
    const std::byte* own = has_table() ? call_.inputs[index(self_)].data : out.data;
    std::size_t at = table_bytes();
    for (int i = 0; has_table() && i < self_; ++i) at += round_up(call_.inputs[index(i)].bytes, kLine);
    for (int position = 0; position < size_; ++position) {
      sources_[index(position)] = position == self_ ? own : post_data(position) + at;
    }
    reduce_sources(out.data, out.bytes);
  }

  // Reads the other ranks' chunks, which begin at `first_`, into caches; true where sources_ is complete.
  bool read_chunks(std::size_t bytes) {
    for (int i = 1; i <= size_; ++i) {
      const int position = (self_ + i) % size_;  // each rank starts with another, since readers of one delay each other
      const Tensor& theirs = tensors_[index(position)];
      sources_[index(position)] = theirs.data + first_;
      if (theirs.data != nullptr) continue;
      std::byte* to = node_.bounce(position);
      sources_[index(position)] = to;
      if (!read_chunk(position, to, bytes, false)) return false;
    }
    return true;
  }

  bool work_on(std::size_t bytes) override {
    if (!read_chunks(bytes)) return false;
    std::byte* into = call_.outputs[0].data + first_;
    if (call_.kind == Kind::reduce && self_ != call_.root) {
      const Tensor& root = tensors_[index(call_.root)];
      into = root.data != nullptr ? root.data + first_ : node_.bounce(call_.root);
    }
    reduce_sources(into, bytes);
    if (call_.kind == Kind::reduce) return self_ == call_.root || write_chunk(call_.root, into, bytes, false);
    bool written = true;
    for (int i = 1; i < size_ && written && call_.kind == Kind::all_reduce; ++i) {
      written = write_chunk((self_ + i) % size_, into, bytes, false);
    }
    return written;
  }

  bool contribute() {
    if (contributed_ == own_.rounds || !slot_is_free(kContributions, contributed_)) return false;
    std::byte* to = slot(kContributions, self_, contributed_);
    for (int position = 0; position < size_; ++position) {
      const Part theirs = part(contributed_, position);
      if (position != self_ && theirs.bytes > 0) std::memcpy(to + theirs.in_slot, theirs.data, theirs.bytes);
    }
    publish(kContributions, ++contributed_);
    return true;
  }

  bool reduce_contributions() {
    // This rank's contribution comes first: its tensor then gets the result, which must not be sent as a contribution.
    if (reduced_ == contributed_) return false;
    if (has_results() && !slot_is_free(kResults, reduced_)) return false;
    for (int position = 0; position < size_; ++position) {
      if (position != self_ && published(kContributions, position) <= reduced_) return false;
    }
    const Part own = part(reduced_, self_);
    if (own.bytes > 0) {
      for (int position = 0; position < size_; ++position) {
        sources_[index(position)] =
            position == self_ ? own.data : slot(kContributions, position, reduced_) + own.in_slot;
      }
      std::byte* into =
          has_results() ? slot(kResults, self_, reduced_) : call_.outputs[0].data + part_bytes_ * reduced_;
      reduce_sources(into, own.bytes);
      if (wants_results()) std::memcpy(own.data, into, own.bytes);
    }
    ++reduced_;
    for (int position = 0; position < size_; ++position) take(kContributions, position, reduced_);
    if (has_results()) {
      publish(kResults, reduced_);
    } else {
      node_.ring_doorbell();
    }
    return true;
  }

  bool collect() {
    bool moved = false;
    for (int position = 0; position < size_; ++position) {
      std::uint32_t& collected = collected_[index(position)];
      if (position == self_ || collected == own_.rounds || published(kResults, position) <= collected) continue;
      const Part theirs = part(collected, position);
      if (theirs.bytes > 0) std::memcpy(theirs.data, slot(kResults, position, collected), theirs.bytes);
      take(kResults, position, ++collected);
      moved = true;
    }
    if (moved) node_.ring_doorbell();
    return moved;
  }

  bool needs_post(int) const override {
    // Only the root of a short reduce reads the posts.
    return own_.rounds > 0 || call_.kind != Kind::reduce || self_ == call_.root;
  }

  void write_post(std::byte* data) override {
    if (has_table()) data = write_table(data);
    const std::span<const Buffer> given = has_table() ? call_.inputs : call_.outputs;
    if (own_.rounds > 0) {
      refer(data, given, kContributions);
      if (own_.refers == Refers::not_at_all && pays_by_address()) refer_by_address(data, given);
      return;
    }
    if (has_table()) return write_inputs(data);
    if (given[0].bytes > 0) std::memcpy(data, given[0].data, given[0].bytes);
  }

  std::uint64_t expected_bytes(int) const override { return has_table() ? call_.outputs[0].bytes : 0; }
  bool advance() override {
    if (own_.rounds == 0) {
      if (posts_reduced_) return false;
      reduce_posts();
      posts_reduced_ = true;
      return true;
    }
    if (mode_ == Mode::undecided && has_table()) choose_mode(call_.inputs[index(self_)], index(self_), true);
    if (mode_ == Mode::undecided) choose_mode(call_.outputs[0], 0, false);
    if (mode_ != Mode::not_in_place) return advance_in_place();
    bool moved = contribute();
    moved |= reduce_contributions();
    if (wants_results()) moved |= collect();
    return moved;
  }

  bool done() const override {
    if (own_.rounds == 0) return posts_reduced_;
    if (mode_ != Mode::not_in_place) return mode_ == Mode::done;
    if (contributed_ < own_.rounds || reduced_ < own_.rounds) return false;
    for (int position = 0; position < size_; ++position) {
      if (wants_results() && position != self_ && collected_[index(position)] < own_.rounds) return false;
    }
    return true;
  }

  bool waits_for(int position) const override {
    if (mode_ != Mode::not_in_place) return waits_in_place_for(position);
    if (reduced_ < own_.rounds && published(kContributions, position) <= reduced_) return true;
    if (wants_results() && collected_[index(position)] < own_.rounds) return true;
    return contributed_ < own_.rounds || reduced_ < own_.rounds;
  }

  bool reads(Stream stream, int reader) const override {
    return stream == kContributions || call_.kind == Kind::all_reduce || reader == call_.root;
  }

  const Reduction reduction_;
  std::uint32_t contributed_ = 0;  // rounds
  std::uint32_t reduced_ = 0;
  std::vector<std::uint32_t> collected_;  // by position
  std::vector<const void*> sources_;
  bool posts_reduced_ = false;
};

}  // namespace

std::unique_ptr<Algorithm> make_shm_reduce(const Call& call, const Paths& paths, Team) {
  return std::make_unique<ShmReduce>(call, paths.mesh, *paths.node);
}

}  // namespace netfold::collective
