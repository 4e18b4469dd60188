#include <netfold/collective/shm_copy.hpp>
#include <netfold/kernels/copy.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

using kernels::copy;

constexpr auto kStream = &transport::ShmNode::Segment::to_copy;
// Between two looks at the deadline and at who has left.
constexpr std::size_t kChunkBytes = 1 << 20;
// Who lends a buffer waits for its readers; who goes through slots is done first and takes half of the work of a single
// reader off it. So with several readers, or with one of a whole broadcast, one copy is not always less time; measured,
// docs/explanation/algorithms.md.
constexpr std::size_t kLendBytes = 512 << 10;

}  // namespace

ShmCopy::ShmCopy(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
    : ShmCollective(call, mesh, node),
      streams_(call.choice_bytes() >= kernels::kBeyondCaches),
      collected_(static_cast<std::size_t>(node.size())),
      copied_(static_cast<std::size_t>(node.size())),
      by_slots_(static_cast<std::size_t>(node.size())),
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
    complete_[static_cast<std::size_t>(position)] = !takes_from(position);
  }
  if (!gives() || call.kind == Kind::broadcast) complete_[static_cast<std::size_t>(self_)] = true;
}

bool ShmCopy::gives() const {
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

bool ShmCopy::takes_from(int source) const {
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

bool ShmCopy::reads(Stream, int reader) const { return call_.kind != Kind::gather || reader == call_.root; }

const Buffer& ShmCopy::into(int source) const {
  const bool one = call_.kind == Kind::broadcast || call_.kind == Kind::scatter;
  return call_.outputs[one ? 0 : static_cast<std::size_t>(source)];
}

const Buffer& ShmCopy::given() const { return call_.kind == Kind::broadcast ? call_.outputs[0] : call_.inputs[0]; }

bool ShmCopy::copy_own() {
  const auto at = static_cast<std::size_t>(self_);
  const Buffer& to = into(self_);
  const Buffer& mine = has_table() ? call_.inputs[at] : given();
  const std::size_t bytes = std::min(kChunkBytes, to.bytes - copied_[at]);
  copy(to.data + copied_[at], mine.data + copied_[at], bytes, streams_);
  copied_[at] += bytes;
  complete_[at] = copied_[at] == to.bytes;
  return true;
}

ShmCopy::Part ShmCopy::part(std::uint32_t round, int reader, std::size_t bytes) const {
  const std::size_t most = has_table() ? part_bytes_ : Node::kSlotBytes;
  const std::size_t first = std::min(bytes, most * round);
  return {has_table() ? part_bytes_ * static_cast<std::size_t>(reader) : 0, first, std::min(most, bytes - first)};
}

bool ShmCopy::needs_post(int position) const { return takes_from(position) || call_.kind == Kind::barrier; }

void ShmCopy::write_post(std::byte* data) {
  if (!gives()) return;
  if (!has_table()) {
    if (mine_.rounds > 0) return export_buffers(data, {&given(), 1});
    return copy(data, given().data, given().bytes, false);
  }
  write_table(data);
  data += table_bytes();
  if (mine_.rounds > 0) return export_buffers(data, call_.inputs);
  for (const Buffer& input : call_.inputs) {
    copy(data, input.data, input.bytes, false);
    data += round_up(input.bytes, kLine);
  }
}

void ShmCopy::export_buffers(std::byte* data, std::span<const Buffer> buffers) {
  refer(data, buffers, kStream);
  if (mine_.refers != Refers::not_at_all || node_.memory() == nullptr) return;
  std::size_t widest = 0;
  for (const Buffer& buffer : buffers) widest = std::max(widest, buffer.bytes);
  if (pays_to_export(widest)) refer_by_address(data, buffers);
}

bool ShmCopy::pays_to_export(std::size_t bytes) const {
  if (call_.kind == Kind::broadcast) return size_ == 2 && bytes < kLendBytes;
  if (call_.kind == Kind::all_gather && size_ > 2 && streams_)
    return false;  // the kernel does not copy past the caches
  return size_ == 2 || call_.kind == Kind::all_to_all || bytes >= kLendBytes;
}

std::uint64_t ShmCopy::expected_bytes(int position) const {
  return call_.kind == Kind::broadcast || call_.kind == Kind::barrier ? 0 : into(position).bytes;
}

bool ShmCopy::advance() {
  bool moved = mine_.refers == Refers::not_at_all ? offer() : wait_for_readers();
  // Each starts behind itself: not everybody reads from the same rank at once.
  for (int i = 1; i <= size_ && !failure_; ++i) {
    const int source = (self_ + i) % size_;
    const auto at = static_cast<std::size_t>(source);
    if (complete_[at]) continue;
    if (source == self_) {
      moved |= copy_own();
    } else if (theirs_[at].rounds == 0) {
      moved |= copy_post(source);
    } else if (theirs_[at].refers == Refers::not_at_all || by_slots_[at]) {
      moved |= collect(source);
    } else {
      moved |= copy_referred(source);
    }
  }
  return moved;
}

bool ShmCopy::copy_post(int source) {
  const std::byte* from = post_data(source) + table_bytes();
  for (int i = 0; has_table() && i < self_; ++i) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, post_data(source) + static_cast<std::size_t>(i) * sizeof bytes, sizeof bytes);
    from += round_up(bytes, kLine);
  }
  copy(into(source).data, from, into(source).bytes, false);
  return complete_[static_cast<std::size_t>(source)] = true;
}

bool ShmCopy::copy_referred(int source) {
  const auto at = static_cast<std::size_t>(source);
  const std::size_t first = copied_[at];
  const std::size_t bytes = std::min(kChunkBytes, into(source).bytes - first);
  if (bytes > 0) {
    if (!begin_use(source)) return false;
    const bool read = read_chunk(source, first, bytes);
    node_.end_use(source);
    if (!read) return false;
  }
  copied_[at] += bytes;
  if (copied_[at] < into(source).bytes) return true;
  take(kStream, source, theirs_[at].rounds);
  node_.ring_doorbell();
  return complete_[at] = true;
}

bool ShmCopy::read_chunk(int source, std::size_t first, std::size_t bytes) {
  const auto at = static_cast<std::size_t>(source);
  const Buffer& to = into(source);
  const std::size_t index = has_table() ? static_cast<std::size_t>(self_) : 0;
  if (theirs_[at].refers == Refers::to_regions) {
    const std::byte* from = referred(source, index, to.bytes);
    if (failure_) return false;
    copy(to.data + first, from + first, bytes, streams_);
    return true;
  }
  using Read = transport::PeerMemory::Read;
  const Read got = node_.memory()->read(source, to.data + first, referred_address(source, index) + first, bytes);
  if (got == Read::all) return true;
  if (got == Read::gone) {
    lose(source);
  } else {
    by_slots_[at] = true;
    ask_for_slots(kStream, source);
  }
  return false;
}

bool ShmCopy::wait_for_readers() {
  if (offered_ == mine_.rounds) return false;
  bool all = true;
  for (int position = 0; position < size_; ++position) {
    if (position == self_ || !reads(kStream, position)) continue;
    if (is_asked_for_slots(kStream, position)) {
      // Who has read the buffer has taken all rounds already.
      mine_.refers = Refers::not_at_all;
      return offer();
    }
    all &= (node_.segment(position).*kStream).taken[self_].load(std::memory_order_acquire) >= tag(mine_.rounds);
  }
  if (all) offered_ = mine_.rounds;
  return all;
}

bool ShmCopy::offer() {
  if (offered_ == mine_.rounds || !slot_is_free(kStream, offered_)) return false;
  std::byte* to = slot(kStream, self_, offered_);
  for (int reader = 0; reader < size_; ++reader) {
    if (has_table() && reader == self_) continue;
    const Buffer& from = has_table() ? call_.inputs[static_cast<std::size_t>(reader)] : given();
    const Part what = part(offered_, reader, from.bytes);
    copy(to + what.in_slot, from.data + what.first, what.bytes, false);
    if (!has_table()) break;  // one for all
  }
  publish(kStream, ++offered_);
  return true;
}

bool ShmCopy::collect(int source) {
  const auto at = static_cast<std::size_t>(source);
  std::uint32_t& collected = collected_[at];
  if (published(kStream, source) <= collected) return false;
  const Buffer& to = into(source);
  const Part what = part(collected, self_, to.bytes);
  copy(to.data + what.first, slot(kStream, source, collected) + what.in_slot, what.bytes, streams_);
  take(kStream, source, ++collected);
  complete_[at] = collected == theirs_[at].rounds;
  node_.ring_doorbell();
  return true;
}

bool ShmCopy::done() const {
  return offered_ == mine_.rounds && std::find(complete_.begin(), complete_.end(), false) == complete_.end();
}

bool ShmCopy::waits_for(int position) const {
  if (!complete_[static_cast<std::size_t>(position)]) return true;
  if (offered_ == mine_.rounds) return false;
  // Who has taken everything may have left the group while others still read.
  const Node::Segment& segment = node_.segment(position);
  if (segment.done.load(std::memory_order_acquire) < node_.last_stream_call()) return true;
  return reads(kStream, position) &&
         (segment.*kStream).taken[self_].load(std::memory_order_acquire) < tag(mine_.rounds);
}

}  // namespace netfold::collective
