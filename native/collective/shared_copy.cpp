#include <netfold/collective/shared_copy.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

constexpr auto kStream = &transport::SharedNode::Segment::to_copy;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

SharedCopy::SharedCopy(const Call& call, transport::Mesh& mesh, transport::SharedNode& node)
    : SharedCall(call, mesh, node),
      collected_(static_cast<std::size_t>(node.size())),
      complete_(static_cast<std::size_t>(node.size())),
      part_bytes_(Node::kSlotBytes / static_cast<std::size_t>(node.size()) / kLine * kLine) {
  if (gives() && has_table()) {
    if (posted_inputs_bytes() > Node::kPostBytes) mine_.rounds = rounds_of_inputs(part_bytes_);
  } else if (gives()) {
    if (call.kind == Kind::all_gather || call.kind == Kind::gather) mine_.header.bytes = given().bytes;
    if (given().bytes > Node::kPostBytes) {
      mine_.rounds = static_cast<std::uint32_t>((given().bytes + Node::kSlotBytes - 1) / Node::kSlotBytes);
    }
  }
  for (int position = 0; position < size_; ++position) {
    complete_[static_cast<std::size_t>(position)] = position == self_ || !takes_from(position);
  }
  copy_own();
}

bool SharedCopy::gives() const {
  switch (call_.kind) {
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      return true;
    case Kind::broadcast:
    case Kind::scatter:
      return self_ == call_.root;
    default:
      return false;
  }
}

bool SharedCopy::takes_from(int source) const {
  switch (call_.kind) {
    case Kind::all_gather:
    case Kind::all_to_all:
      return true;
    case Kind::gather:
      return self_ == call_.root;
    case Kind::broadcast:
    case Kind::scatter:
      return source == call_.root;
    default:
      return false;
  }
}

bool SharedCopy::reads(Stream, int reader) const { return call_.kind != Kind::gather || reader == call_.root; }

const Buffer& SharedCopy::into(int source) const {
  const bool one = call_.kind == Kind::broadcast || call_.kind == Kind::scatter;
  return call_.outputs[one ? 0 : static_cast<std::size_t>(source)];
}

const Buffer& SharedCopy::given() const { return call_.kind == Kind::broadcast ? call_.outputs[0] : call_.inputs[0]; }

void SharedCopy::copy_own() {
  if (!gives() || !takes_from(self_) || call_.kind == Kind::broadcast) return;
  const Buffer& mine = has_table() ? call_.inputs[static_cast<std::size_t>(self_)] : given();
  copy_bytes(into(self_).data, mine.data, mine.bytes);
}

SharedCopy::Part SharedCopy::part(std::uint32_t round, int reader, std::size_t bytes) const {
  const std::size_t most = has_table() ? part_bytes_ : Node::kSlotBytes;
  const std::size_t first = std::min(bytes, most * round);
  return {has_table() ? part_bytes_ * static_cast<std::size_t>(reader) : 0, first, std::min(most, bytes - first)};
}

bool SharedCopy::needs_post(int position) const { return takes_from(position) || call_.kind == Kind::barrier; }

void SharedCopy::write_post(std::byte* data) {
  if (!gives()) return;
  if (!has_table()) {
    if (mine_.rounds > 0) return refer(data, {&given(), 1});
    return copy_bytes(data, given().data, given().bytes);
  }
  write_table(data);
  data += table_bytes();
  if (mine_.rounds > 0) return refer(data, call_.inputs);
  for (const Buffer& input : call_.inputs) {
    copy_bytes(data, input.data, input.bytes);
    data += round_up(input.bytes, kLine);
  }
}

std::uint64_t SharedCopy::expected_bytes(int position) const {
  return call_.kind == Kind::broadcast || call_.kind == Kind::barrier ? 0 : into(position).bytes;
}

bool SharedCopy::advance() {
  bool moved = mine_.refers == 0 ? offer() : wait_for_readers();
  for (int source = 0; source < size_; ++source) {
    const auto at = static_cast<std::size_t>(source);
    if (complete_[at]) continue;
    if (theirs_[at].rounds == 0) {
      moved |= copy_post(source);
    } else {
      moved |= theirs_[at].refers == 0 ? collect(source) : copy_referred(source);
    }
  }
  return moved;
}

bool SharedCopy::copy_post(int source) {
  const std::byte* from = post_data(source) + table_bytes();
  for (int i = 0; has_table() && i < self_; ++i) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, post_data(source) + static_cast<std::size_t>(i) * sizeof bytes, sizeof bytes);
    from += round_up(bytes, kLine);
  }
  copy_bytes(into(source).data, from, into(source).bytes);
  return complete_[static_cast<std::size_t>(source)] = true;
}

bool SharedCopy::copy_referred(int source) {
  const auto at = static_cast<std::size_t>(source);
  const Buffer& to = into(source);
  const std::byte* from = referred(source, has_table() ? static_cast<std::size_t>(self_) : 0, to.bytes);
  if (failure_) return false;
  copy_bytes(to.data, from, to.bytes);
  take(kStream, source, 1);
  node_.ring();
  return complete_[at] = true;
}

bool SharedCopy::wait_for_readers() {
  if (offered_ == mine_.rounds) return false;
  for (int position = 0; position < size_; ++position) {
    if (position == self_ || !reads(kStream, position)) continue;
    if ((node_.segment(position).*kStream).taken[self_].load(std::memory_order_acquire) < tag(1)) return false;
  }
  offered_ = mine_.rounds;
  return true;
}

bool SharedCopy::offer() {
  if (offered_ == mine_.rounds || !slot_is_free(kStream, offered_)) return false;
  std::byte* to = slot(kStream, self_, offered_);
  for (int reader = 0; reader < size_; ++reader) {
    if (has_table() && reader == self_) continue;
    const Buffer& from = has_table() ? call_.inputs[static_cast<std::size_t>(reader)] : given();
    const Part what = part(offered_, reader, from.bytes);
    copy_bytes(to + what.in_slot, from.data + what.first, what.bytes);
    if (!has_table()) break;  // one for all
  }
  publish(kStream, ++offered_);
  return true;
}

bool SharedCopy::collect(int source) {
  const auto at = static_cast<std::size_t>(source);
  std::uint32_t& collected = collected_[at];
  if (published(kStream, source) <= collected) return false;
  const Buffer& to = into(source);
  const Part what = part(collected, self_, to.bytes);
  copy_bytes(to.data + what.first, slot(kStream, source, collected) + what.in_slot, what.bytes);
  take(kStream, source, ++collected);
  complete_[at] = collected == theirs_[at].rounds;
  node_.ring();
  return true;
}

bool SharedCopy::done() const {
  return offered_ == mine_.rounds && std::find(complete_.begin(), complete_.end(), false) == complete_.end();
}

bool SharedCopy::waits_for(int position) const {
  return offered_ < mine_.rounds || !complete_[static_cast<std::size_t>(position)];
}

}  // namespace netfold::collective
