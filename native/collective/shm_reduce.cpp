#include <netfold/collective/shm_reduce.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr auto kContributions = &transport::ShmNode::Segment::to_reduce;
constexpr auto kResults = &transport::ShmNode::Segment::to_copy;

}  // namespace

ShmReduce::ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
    : ShmCollective(call, mesh, node), collected_(index(node.size())), sources_(index(node.size())) {
  own_.rounds = rounds_for(call.outputs[0]);
}

ShmReduce::Part ShmReduce::part(std::uint32_t round, int position) const {
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

bool ShmReduce::needs_post(int) const {
  // Only the root of a short reduce reads the posts.
  return own_.rounds > 0 || call_.kind != Kind::reduce || self_ == call_.root;
}

void ShmReduce::write_post(std::byte* data) {
  if (has_table()) data = write_table(data);
  const std::span<const Buffer> given = has_table() ? call_.inputs : call_.outputs;
  if (own_.rounds > 0) return refer(data, given, kContributions);
  if (has_table()) return write_inputs(data);
  if (given[0].bytes > 0) std::memcpy(data, given[0].data, given[0].bytes);
}

std::uint64_t ShmReduce::expected_bytes(int) const { return has_table() ? call_.outputs[0].bytes : 0; }

bool ShmReduce::reads(Stream stream, int reader) const {
  return stream == kContributions || call_.kind == Kind::all_reduce || reader == call_.root;
}

bool ShmReduce::advance() {
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

void ShmReduce::reduce_sources(std::byte* into, std::size_t bytes) {
  kernels::reduce(call_.reduce, call_.dtype, into, sources_.data(), sources_.size(),
                  bytes / kernels::element_bytes(call_.dtype));
  if (call_.average) divide(call_.dtype, {into, bytes}, size_);
}

void ShmReduce::reduce_posts() {
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

void ShmReduce::choose_mode() {
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

bool ShmReduce::reduce_in_place() {
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

bool ShmReduce::contribute() {
  if (contributed_ == own_.rounds || !slot_is_free(kContributions, contributed_)) return false;
  std::byte* to = slot(kContributions, self_, contributed_);
  for (int position = 0; position < size_; ++position) {
    const Part theirs = part(contributed_, position);
    if (position != self_ && theirs.bytes > 0) std::memcpy(to + theirs.in_slot, theirs.data, theirs.bytes);
  }
  publish(kContributions, ++contributed_);
  return true;
}

bool ShmReduce::reduce_contributions() {
  // This rank's contribution comes first: its tensor then gets the result, which must not be sent as a contribution.
  if (reduced_ == contributed_) return false;
  if (has_results() && !slot_is_free(kResults, reduced_)) return false;
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && published(kContributions, position) <= reduced_) return false;
  }
  const Part own = part(reduced_, self_);
  if (own.bytes > 0) {
    for (int position = 0; position < size_; ++position) {
      sources_[index(position)] = position == self_ ? own.data : slot(kContributions, position, reduced_) + own.in_slot;
    }
    std::byte* into = has_results() ? slot(kResults, self_, reduced_) : call_.outputs[0].data + part_bytes_ * reduced_;
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

bool ShmReduce::collect() {
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

bool ShmReduce::done() const {
  if (own_.rounds == 0) return posts_reduced_;
  if (mode_ != Mode::streams) return mode_ == Mode::done_in_place;
  if (contributed_ < own_.rounds || reduced_ < own_.rounds) return false;
  for (int position = 0; position < size_; ++position) {
    if (wants_results() && position != self_ && collected_[index(position)] < own_.rounds) return false;
  }
  return true;
}

bool ShmReduce::waits_for(int position) const {
  if (mode_ != Mode::streams) return published(kContributions, position) == 0;
  if (reduced_ < own_.rounds && published(kContributions, position) <= reduced_) return true;
  if (wants_results() && collected_[index(position)] < own_.rounds) return true;
  return contributed_ < own_.rounds || reduced_ < own_.rounds;
}

}  // namespace netfold::collective
