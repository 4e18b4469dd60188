#include <netfold/collective/shm_copy.hpp>
#include <netfold/kernels/copy.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

using kernels::copy;

constexpr auto kStream = &transport::ShmNode::Segment::to_copy;
// Bytes copied between two checks of the deadline and of ranks that have left.
constexpr std::size_t kChunkBytes = 1 << 20;
// A rank that exports a buffer waits for its readers. A rank that sends through slots finishes first, and does half of
// the work of a single reader. So with several readers, or with one reader of a whole broadcast, one copy is not always
// faster. Measured in docs/explanation/algorithms.md.
constexpr std::size_t kExportBytes = 512 << 10;

}  // namespace

ShmCopy::ShmCopy(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
    : ShmCollective(call, mesh, node),
      streams_(call.choice_bytes() >= kernels::kBeyondCaches),
      collected_(index(node.size())),
      copied_(index(node.size())),
      by_slots_(index(node.size())),
      complete_(index(node.size())) {
  if (gives()) {
    own_.rounds = rounds_for(given());
    if (call.kind == Kind::all_gather || call.kind == Kind::gather) own_.header.bytes = given().bytes;
  }
  for (int position = 0; position < size_; ++position) complete_[index(position)] = !takes_from(position);
  if (!gives() || call.kind == Kind::broadcast) complete_[index(self_)] = true;
}

bool ShmCopy::reads(Stream, int reader) const { return call_.kind != Kind::gather || reader == call_.root; }

bool ShmCopy::copy_own() {
  const Buffer& to = into(self_);
  const Buffer& from = *call_.given_to(self_, self_);
  std::size_t& copied = copied_[index(self_)];
  const std::size_t bytes = std::min(kChunkBytes, to.bytes - copied);
  copy(to.data + copied, from.data + copied, bytes, streams_);
  copied += bytes;
  complete_[index(self_)] = copied == to.bytes;
  return true;
}

ShmCopy::Part ShmCopy::part(std::uint32_t round, int reader, std::size_t bytes) const {
  const std::size_t most = has_table() ? part_bytes_ : Node::kSlotBytes;
  const std::size_t first = std::min(bytes, most * round);
  return {has_table() ? part_bytes_ * index(reader) : 0, first, std::min(most, bytes - first)};
}

bool ShmCopy::needs_post(int position) const { return takes_from(position) || call_.kind == Kind::barrier; }

void ShmCopy::write_post(std::byte* data) {
  if (!gives()) return;
  if (has_table()) data = write_table(data);
  if (own_.rounds > 0) return export_buffers(data, has_table() ? call_.inputs : std::span(&given(), 1));
  if (has_table()) return write_inputs(data);
  copy(data, given().data, given().bytes, false);
}

void ShmCopy::export_buffers(std::byte* data, std::span<const Buffer> buffers) {
  refer(data, buffers, kStream);
  if (own_.refers != Refers::not_at_all || node_.memory() == nullptr) return;
  std::size_t widest = 0;
  for (const Buffer& buffer : buffers) widest = std::max(widest, buffer.bytes);
  if (pays_to_export(widest)) refer_by_address(data, buffers);
}

bool ShmCopy::pays_to_export(std::size_t bytes) const {
  if (call_.kind == Kind::broadcast) return size_ == 2 && bytes < kExportBytes;
  // The kernel's copies do not bypass the caches.
  if (call_.kind == Kind::all_gather && size_ > 2 && streams_) return false;
  return size_ == 2 || call_.kind == Kind::all_to_all || bytes >= kExportBytes;
}

std::uint64_t ShmCopy::expected_bytes(int position) const {
  return call_.kind == Kind::broadcast || call_.kind == Kind::barrier ? 0 : into(position).bytes;
}

bool ShmCopy::advance() {
  bool moved = own_.refers == Refers::not_at_all ? offer() : wait_for_readers();
  // Each rank starts with the rank after it, so that the ranks do not all read from the same rank.
  for (int i = 1; i <= size_ && !failure_; ++i) {
    const int source = (self_ + i) % size_;
    const Announcement& announcement = others_[index(source)];
    if (complete_[index(source)]) continue;
    if (source == self_) {
      moved |= copy_own();
    } else if (announcement.rounds == 0) {
      moved |= copy_post(source);
    } else if (announcement.refers == Refers::not_at_all || by_slots_[index(source)]) {
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
    std::memcpy(&bytes, post_data(source) + index(i) * sizeof bytes, sizeof bytes);
    from += round_up(bytes, kLine);
  }
  copy(into(source).data, from, into(source).bytes, false);
  return complete_[index(source)] = true;
}

bool ShmCopy::copy_referred(int source) {
  const std::size_t first = copied_[index(source)];
  const std::size_t bytes = std::min(kChunkBytes, into(source).bytes - first);
  if (bytes > 0) {
    if (!begin_use(source)) return false;
    const bool read = read_chunk(source, first, bytes);
    node_.end_use(source);
    if (!read) return false;
  }
  copied_[index(source)] += bytes;
  if (copied_[index(source)] < into(source).bytes) return true;
  take(kStream, source, others_[index(source)].rounds);
  node_.ring_doorbell();
  return complete_[index(source)] = true;
}

bool ShmCopy::read_chunk(int source, std::size_t first, std::size_t bytes) {
  const Buffer& to = into(source);
  const std::size_t number = has_table() ? index(self_) : 0;
  if (others_[index(source)].refers == Refers::to_regions) {
    const std::byte* from = referred(source, number, to.bytes);
    if (failure_) return false;
    copy(to.data + first, from + first, bytes, streams_);
    return true;
  }
  using Read = transport::PeerMemory::Read;
  const Read got = node_.memory()->read(source, to.data + first, referred_address(source, number) + first, bytes);
  if (got == Read::all) return true;
  if (got == Read::gone) {
    lose(source);
  } else {
    by_slots_[index(source)] = true;
    ask_for_slots(kStream, source);
  }
  return false;
}

bool ShmCopy::wait_for_readers() {
  if (offered_ == own_.rounds) return false;
  bool all = true;
  for (int position = 0; position < size_; ++position) {
    if (position == self_ || !reads(kStream, position)) continue;
    if (is_asked_for_slots(kStream, position)) {
      // A rank that has read the buffer has taken all rounds already.
      own_.refers = Refers::not_at_all;
      return offer();
    }
    all &= has_taken(kStream, position, own_.rounds);
  }
  if (all) offered_ = own_.rounds;
  return all;
}

bool ShmCopy::offer() {
  if (offered_ == own_.rounds || !slot_is_free(kStream, offered_)) return false;
  std::byte* to = slot(kStream, self_, offered_);
  for (int reader = 0; reader < size_; ++reader) {
    if (has_table() && reader == self_) continue;
    const Buffer& from = has_table() ? call_.inputs[index(reader)] : given();
    const Part range = part(offered_, reader, from.bytes);
    copy(to + range.in_slot, from.data + range.first, range.bytes, false);
    if (!has_table()) break;  // the same for all readers
  }
  publish(kStream, ++offered_);
  return true;
}

bool ShmCopy::collect(int source) {
  std::uint32_t& collected = collected_[index(source)];
  if (published(kStream, source) <= collected) return false;
  const Buffer& to = into(source);
  const Part range = part(collected, self_, to.bytes);
  copy(to.data + range.first, slot(kStream, source, collected) + range.in_slot, range.bytes, streams_);
  take(kStream, source, ++collected);
  complete_[index(source)] = collected == others_[index(source)].rounds;
  node_.ring_doorbell();
  return true;
}

bool ShmCopy::done() const {
  return offered_ == own_.rounds && std::find(complete_.begin(), complete_.end(), false) == complete_.end();
}

bool ShmCopy::waits_for(int position) const {
  if (!complete_[index(position)]) return true;
  if (offered_ == own_.rounds) return false;
  // A rank that has taken everything may have left the group while other ranks still read.
  if (node_.segment(position).done.load(std::memory_order_acquire) < node_.last_stream_call()) return true;
  return reads(kStream, position) && !has_taken(kStream, position, own_.rounds);
}

}  // namespace netfold::collective
