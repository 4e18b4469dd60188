#include <netfold/collective/shm_reduce.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
ShmReduce::ShmReduce(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
    : ShmCollective(call, mesh, node),
      collected_(static_cast<std::size_t>(node.size())),
      sources_(static_cast<std::size_t>(node.size())),
      part_bytes_(Node::kSlotBytes / static_cast<std::size_t>(node.size()) / kLine * kLine) {
  if (has_table()) {
    if (posted_inputs_bytes() > Node::kPostBytes) mine_.rounds = rounds_of_inputs(part_bytes_);
  } else if (call.outputs[0].bytes > Node::kPostBytes) {
    mine_.rounds = static_cast<std::uint32_t>((call.outputs[0].bytes + Node::kSlotBytes - 1) / Node::kSlotBytes);
  }
}

ShmReduce::Part ShmReduce::part(std::uint32_t round, int position) const {
  const auto at = static_cast<std::size_t>(position);
  if (has_table()) {
    const Buffer& input = call_.inputs[at];
    const std::size_t first = std::min(input.bytes, part_bytes_ * round);
    return {part_bytes_ * at, input.data + first, std::min(part_bytes_, input.bytes - first)};
  }
  const Buffer& tensor = call_.outputs[0];
  const std::size_t first = Node::kSlotBytes * round;
  const std::size_t bytes = std::min(Node::kSlotBytes, tensor.bytes - first);
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t share = round_up((bytes + ranks - 1) / ranks, kLine);
  const std::size_t in_slot = std::min(bytes, share * at);
  return {in_slot, tensor.data + first + in_slot, std::min(share, bytes - in_slot)};
}

bool ShmReduce::needs_post(int) const {
  // A short reduction is the root's business alone.
  return mine_.rounds > 0 || call_.kind != Kind::reduce || self_ == call_.root;
}

void ShmReduce::write_post(std::byte* data) {
  if (has_table()) {
    write_table(data);
    data += table_bytes();
    if (mine_.rounds > 0) return refer(data, call_.inputs, &Node::Segment::to_reduce);
    for (const Buffer& input : call_.inputs) {
      if (input.bytes > 0) std::memcpy(data, input.data, input.bytes);
      data += round_up(input.bytes, kLine);
    }
  } else if (mine_.rounds > 0) {
    refer(data, call_.outputs, &Node::Segment::to_reduce);
  } else if (call_.outputs[0].bytes > 0) {
    std::memcpy(data, call_.outputs[0].data, call_.outputs[0].bytes);
  }
}

std::uint64_t ShmReduce::expected_bytes(int) const { return has_table() ? call_.outputs[0].bytes : 0; }

bool ShmReduce::reads(Stream stream, int reader) const {
  return stream == &Node::Segment::to_reduce || call_.kind == Kind::all_reduce || reader == call_.root;
}

bool ShmReduce::advance() {
  if (mine_.rounds == 0) {
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

void ShmReduce::reduce_posts() {
  const bool idle = call_.kind == Kind::reduce && self_ != call_.root;
  const Buffer& out = call_.outputs[0];
  if (idle || out.bytes == 0) return;
  const std::byte* own = has_table() ? call_.inputs[static_cast<std::size_t>(self_)].data : out.data;
  std::size_t at = table_bytes();
  for (int i = 0; has_table() && i < self_; ++i) at += round_up(call_.inputs[static_cast<std::size_t>(i)].bytes, kLine);
  for (int position = 0; position < size_; ++position) {
    sources_[static_cast<std::size_t>(position)] = position == self_ ? own : post_data(position) + at;
  }
  kernels::reduce(call_.reduce, call_.dtype, out.data, sources_.data(), sources_.size(),
                  out.bytes / kernels::element_bytes(call_.dtype));
  if (call_.average) divide(call_.dtype, out, size_);
}

void ShmReduce::choose_mode() {
  mode_ = Mode::streams;
  for (int position = 0; position < size_; ++position) {
    const Announcement& announcement = position == self_ ? mine_ : theirs_[static_cast<std::size_t>(position)];
    if (announcement.refers != Refers::to_regions) return;
  }
  mode_ = Mode::reducing_in_place;
  const auto self = static_cast<std::size_t>(self_);
  whole_ = has_table() ? call_.inputs[self] : call_.outputs[0];
  for (int position = 0; position < size_ && !failure_; ++position) {
    tensors_.push_back(position == self_ ? whole_.data : referred(position, has_table() ? self : 0, whole_.bytes));
  }
  if (has_table()) return;
  // Of a tensor that all fold together, this rank's part.
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t share = round_up((whole_.bytes + ranks - 1) / ranks, kLine);
  first_ = std::min(whole_.bytes, share * self);
  whole_.bytes = std::min(whole_.bytes, first_ + share);
}

bool ShmReduce::reduce_in_place() {
  if (mode_ == Mode::reducing_in_place && first_ < whole_.bytes) {
    const std::size_t bytes = std::min(part_bytes_, whole_.bytes - first_);
    for (std::size_t i = 0; i < tensors_.size(); ++i) sources_[i] = tensors_[i] + first_;
    std::byte* into = call_.outputs[0].data + first_;
    if (call_.kind == Kind::reduce) into = tensors_[static_cast<std::size_t>(call_.root)] + first_;
    if (!begin_use_of_all()) return false;
    kernels::reduce(call_.reduce, call_.dtype, into, sources_.data(), sources_.size(),
                    bytes / kernels::element_bytes(call_.dtype));
    if (call_.average) divide(call_.dtype, {into, bytes}, size_);
    for (std::byte* tensor : tensors_) {
      if (call_.kind == Kind::all_reduce && tensor + first_ != into) std::memcpy(tensor + first_, into, bytes);
    }
    node_.end_use_of_all();
    first_ += bytes;
    return true;
  }
  if (mode_ == Mode::reducing_in_place) {
    mode_ = Mode::waiting_in_place;
    publish(&Node::Segment::to_reduce, 1);
  }
  if (mode_ == Mode::done_in_place) return false;
  // The others read and write this rank's tensor until they say that they are through.
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && published(&Node::Segment::to_reduce, position) == 0) return false;
  }
  mode_ = Mode::done_in_place;
  return true;
}

bool ShmReduce::contribute() {
  if (contributed_ == mine_.rounds || !slot_is_free(&Node::Segment::to_reduce, contributed_)) return false;
  std::byte* to = slot(&Node::Segment::to_reduce, self_, contributed_);
  for (int position = 0; position < size_; ++position) {
    const Part what = part(contributed_, position);
    if (position != self_ && what.bytes > 0) std::memcpy(to + what.in_slot, what.data, what.bytes);
  }
  publish(&Node::Segment::to_reduce, ++contributed_);
  return true;
}

bool ShmReduce::reduce_contributions() {
  // This rank's contribution comes first: what it folds into its tensor must not be sent on as its own.
  if (reduced_ == contributed_) return false;
  if (has_results() && !slot_is_free(&Node::Segment::to_copy, reduced_)) return false;
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && published(&Node::Segment::to_reduce, position) <= reduced_) return false;
  }
  const Part what = part(reduced_, self_);
  if (what.bytes > 0) {
    for (int position = 0; position < size_; ++position) {
      sources_[static_cast<std::size_t>(position)] =
          position == self_ ? what.data : slot(&Node::Segment::to_reduce, position, reduced_) + what.in_slot;
    }
    std::byte* into =
        has_results() ? slot(&Node::Segment::to_copy, self_, reduced_) : call_.outputs[0].data + part_bytes_ * reduced_;
    kernels::reduce(call_.reduce, call_.dtype, into, sources_.data(), sources_.size(),
                    what.bytes / kernels::element_bytes(call_.dtype));
    if (call_.average) divide(call_.dtype, {into, what.bytes}, size_);
    if (wants_results()) std::memcpy(what.data, into, what.bytes);
  }
  ++reduced_;
  for (int position = 0; position < size_; ++position) take(&Node::Segment::to_reduce, position, reduced_);
  if (has_results()) {
    publish(&Node::Segment::to_copy, reduced_);
  } else {
    node_.ring_doorbell();
  }
  return true;
}

bool ShmReduce::collect() {
  bool moved = false;
  for (int position = 0; position < size_; ++position) {
    std::uint32_t& collected = collected_[static_cast<std::size_t>(position)];
    // What is folded here is still this rank's contribution, elsewhere and earlier.
    if (position == self_ || collected == mine_.rounds || published(&Node::Segment::to_copy, position) <= collected) {
      continue;
    }
    const Part what = part(collected, position);
    if (what.bytes > 0) std::memcpy(what.data, slot(&Node::Segment::to_copy, position, collected), what.bytes);
    take(&Node::Segment::to_copy, position, ++collected);
    moved = true;
  }
  if (moved) node_.ring_doorbell();
  return moved;
}

bool ShmReduce::done() const {
  if (mine_.rounds == 0) return posts_reduced_;
  if (mode_ != Mode::streams) return mode_ == Mode::done_in_place;
  if (contributed_ < mine_.rounds || reduced_ < mine_.rounds) return false;
  for (int position = 0; position < size_; ++position) {
    if (wants_results() && position != self_ && collected_[static_cast<std::size_t>(position)] < mine_.rounds)
      return false;
  }
  return true;
}

bool ShmReduce::waits_for(int position) const {
  if (mode_ != Mode::streams) return published(&Node::Segment::to_reduce, position) == 0;
  if (reduced_ < mine_.rounds && published(&Node::Segment::to_reduce, position) <= reduced_) return true;
  if (wants_results() && collected_[static_cast<std::size_t>(position)] < mine_.rounds) return true;
  return contributed_ < mine_.rounds || reduced_ < mine_.rounds;
}

}  // namespace netfold::collective
