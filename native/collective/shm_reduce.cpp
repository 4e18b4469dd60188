// Reductions among ranks that share memory: all_reduce, reduce, reduce_scatter. All add in rank order.
//
// Few bytes (n <= 16 KB): one step. Every rank posts its n bytes and reduces all P posts.
// More bytes: rank d reduces part d of every round from all ranks' slots. Except in reduce_scatter, it passes the
// result through its own slots to the ranks that need it. Steps: 3 a round of 256 KB (contributions, results, taken).
// More bytes, with every rank's tensor in shared memory: rank d reduces part d of the tensors in place and writes the
// result straight into every rank's tensor. Two steps.
//
// Bytes on the wire: none. Memory traffic a rank of P: the tensor is read once and written once; in the caches a rank
// copies n(P-1)/P in, reduces n, and copies n(P-1)/P out. With tensors in shared memory: n read and n written.
#include <netfold/collective/shm_collective.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

constexpr auto kContributions = transport::ShmNode::Stream::to_reduce;
constexpr auto kResults = transport::ShmNode::Stream::to_copy;

class ShmReduce final : public ShmCollective {
 public:
  ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
      : ShmCollective(call, mesh, node), collected_(index(node.size())), sources_(index(node.size())) {
    own_.rounds = rounds_for(call.outputs[0]);
  }

 private:
  enum class Mode : std::uint8_t { undecided, streams, reducing_in_place, waiting_in_place, done_in_place };
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

  // The bytes of a buffer that each rank reduces: whole lines; the last ranks get the rest.
  std::size_t share_bytes(std::size_t bytes) const {
    return round_up((bytes + index(size_) - 1) / index(size_), kLine);
  }
  bool has_results() const { return call_.kind != Kind::reduce_scatter; }
  bool wants_results() const { return call_.kind == Kind::all_reduce || (has_results() && self_ == call_.root); }
  // Reduces sources_ and divides for an average.
  void reduce_sources(std::byte* into, std::size_t bytes) {
    kernels::reduce(call_.reduce, call_.dtype, into, sources_.data(), sources_.size(),
                    bytes / kernels::element_bytes(call_.dtype));
    if (call_.average) divide(call_.dtype, {into, bytes}, size_);
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

  void choose_mode() {
    mode_ = Mode::streams;
    for (int position = 0; position < size_; ++position) {
      const Announcement& announcement = position == self_ ? own_ : others_[index(position)];
      if (announcement.refers != Refers::to_regions) return;
    }
    mode_ = Mode::reducing_in_place;
    const Buffer& tensor = has_table() ? call_.inputs[index(self_)] : call_.outputs[0];
    const std::size_t number = has_table() ? index(self_) : 0;
    for (int position = 0; position < size_ && !failure_; ++position) {
      tensors_.push_back(position == self_ ? tensor.data : referred(position, number, tensor.bytes));
    }
    const std::size_t share = share_bytes(tensor.bytes);
    first_ = has_table() ? 0 : std::min(tensor.bytes, share * index(self_));
    end_ = has_table() ? tensor.bytes : std::min(tensor.bytes, first_ + share);
  }

  bool reduce_in_place() {
    if (mode_ == Mode::reducing_in_place && first_ < end_) {
      const std::size_t bytes = std::min(part_bytes_, end_ - first_);
      for (std::size_t i = 0; i < tensors_.size(); ++i) sources_[i] = tensors_[i] + first_;
      std::byte* into = call_.outputs[0].data + first_;
      if (call_.kind == Kind::reduce) into = tensors_[index(call_.root)] + first_;
      if (!begin_use_of_all()) return false;
      reduce_sources(into, bytes);
      for (std::byte* tensor : tensors_) {
        if (call_.kind == Kind::all_reduce && tensor + first_ != into) std::memcpy(tensor + first_, into, bytes);
      }
      node_.end_use_of_all();
      first_ += bytes;
      return true;
    }
    if (mode_ == Mode::reducing_in_place) {
      mode_ = Mode::waiting_in_place;
      publish(kContributions, 1);
    }
    if (mode_ == Mode::done_in_place) return false;
    // Other ranks read and write this rank's tensor until they publish the end of their part.
    for (int position = 0; position < size_; ++position) {
      if (position != self_ && published(kContributions, position) == 0) return false;
    }
    mode_ = Mode::done_in_place;
    return true;
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
    if (own_.rounds > 0) return refer(data, given, kContributions);
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
    if (mode_ == Mode::undecided) choose_mode();
    if (mode_ != Mode::streams) return reduce_in_place();
    bool moved = contribute();
    moved |= reduce_contributions();
    if (wants_results()) moved |= collect();
    return moved;
  }

  bool done() const override {
    if (own_.rounds == 0) return posts_reduced_;
    if (mode_ != Mode::streams) return mode_ == Mode::done_in_place;
    if (contributed_ < own_.rounds || reduced_ < own_.rounds) return false;
    for (int position = 0; position < size_; ++position) {
      if (wants_results() && position != self_ && collected_[index(position)] < own_.rounds) return false;
    }
    return true;
  }

  bool waits_for(int position) const override {
    if (mode_ != Mode::streams) return published(kContributions, position) == 0;
    if (reduced_ < own_.rounds && published(kContributions, position) <= reduced_) return true;
    if (wants_results() && collected_[index(position)] < own_.rounds) return true;
    return contributed_ < own_.rounds || reduced_ < own_.rounds;
  }

  bool reads(Stream stream, int reader) const override {
    return stream == kContributions || call_.kind == Kind::all_reduce || reader == call_.root;
  }

  std::uint32_t contributed_ = 0;  // rounds
  std::uint32_t reduced_ = 0;
  std::vector<std::uint32_t> collected_;  // by position
  std::vector<const void*> sources_;
  bool posts_reduced_ = false;
  Mode mode_ = Mode::undecided;  // of data that do not lie in posts
  // In place:
  std::size_t first_ = 0;            // the next byte of this rank's part
  std::size_t end_ = 0;              // of this rank's part
  std::vector<std::byte*> tensors_;  // by position
};

}  // namespace

std::unique_ptr<Algorithm> make_shm_reduce(const Call& call, const Paths& paths, Team) {
  return std::make_unique<ShmReduce>(call, paths.mesh, *paths.node);
}

}  // namespace netfold::collective
