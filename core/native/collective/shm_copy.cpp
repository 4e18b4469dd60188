// Copies among ranks that share memory: broadcast, all_gather, gather, scatter, all_to_all; and barrier.
//
// Few bytes from a rank (<= 16 KB for all its readers): they lie in the rank's post, and the readers copy them from
// there (one step). More bytes go through the slots of the rank's stream, 256 KB per round. In broadcast, all_gather and
// gather every reader copies the whole slot; in scatter and all_to_all a slot has a part for each reader. Ranks may
// differ in this, as they may differ in bytes. Where the buffer lies in shared memory, or ranks may read each other's
// memory, the readers copy straight from the buffer, once. A reader that cannot read the buffer after all (a device's
// memory) asks for slots.
//
// A large broadcast by address is shared out: rank d copies part d of the root's buffer to every other rank, so the root
// is not idle, and each part of its buffer is read once.
//
// Bytes on the wire: none. Memory traffic: each reader copies each byte once; with slots, the owner copies each byte
// into a slot first. In a broadcast that is shared out, n are read in all, and n written to each rank but the root.
#include <netfold/collective/slice.hpp>
#include <netfold/kernels/copy.hpp>

#include <algorithm>
#include <cstring>

#include "algorithms.hpp"
#include "shm_in_place.hpp"

namespace netfold::collective {
namespace {

using kernels::copy;

constexpr auto kStream = transport::ShmNode::Stream::to_copy;
// A rank that exports a buffer waits for its readers. A rank that sends through slots finishes first, and does half of
// the work of a single reader. So with several readers, or with one reader of a whole broadcast, one copy is not always
// faster. Measured in docs/explanation/algorithms.md.
constexpr std::size_t kExportBytes = 512 << 10;
// Broadcasts of so many bytes are shared out between two ranks. Among more, which wait for each other longer, slots take
// less time. Measured by lab/bench/by_address.py.
constexpr std::size_t kShareOutBytes = 4 << 20;

class ShmCopy final : public ShmInPlace {
 public:
  ShmCopy(const Call& call, transport::Mesh& mesh, transport::ShmNode& node)
      : ShmInPlace(call, mesh, node),
        streams_(call.choice_bytes() >= kernels::kBeyondCaches),
        slice_bytes_(slice_bytes(index(node.size()))),
        shares_out_(call.kind == Kind::broadcast && node.memory() != nullptr && node.size() == 2 &&
                    call.choice_bytes() >= kShareOutBytes),
        collected_(index(node.size())),
        copied_(index(node.size())),
        by_slots_(index(node.size())),
        complete_(index(node.size())) {
    if (!shares_out_) mode_ = Mode::not_in_place;
    if (gives()) {
      own_.rounds = rounds_for(given());
      if (call.kind == Kind::all_gather || call.kind == Kind::gather) own_.header.bytes = given().bytes;
    }
    for (int position = 0; position < size_; ++position) complete_[index(position)] = !takes_from(position);
    if (!gives() || call.kind == Kind::broadcast) complete_[index(self_)] = true;
  }

 private:
  struct Part {
    std::size_t in_slot = 0;
    std::size_t first = 0;  // of the buffer
    std::size_t bytes = 0;
  };
  // The bytes that `reader` takes of a round, where it takes `bytes` in all.
  Part part(std::uint32_t round, int reader, std::size_t bytes) const {
    const std::size_t most = has_table() ? part_bytes_ : Node::kSlotBytes;
    const std::size_t first = std::min(bytes, most * round);
    return {has_table() ? part_bytes_ * index(reader) : 0, first, std::min(most, bytes - first)};
  }

  // Every rank that gives anything gives something to the root.
  bool gives() const { return call_.given_to(self_, call_.root) != nullptr; }
  // The bytes that this rank gives to all readers, where it has no block for each.
  const Buffer& given() const { return *call_.given_to(self_, call_.root); }
  bool takes_from(int source) const { return call_.taken_from(self_, source) != nullptr; }
  // The place for the data from `source`.
  const Buffer& into(int source) const { return *call_.taken_from(self_, source); }
  // Refers to what this rank gives, if the other ranks can read it in place.
  void export_buffers(std::byte* data, std::span<const Buffer> buffers) {
    refer(data, buffers, kStream);
    if (own_.refers != Refers::not_at_all || node_.memory() == nullptr) return;
    std::size_t widest = 0;
    for (const Buffer& buffer : buffers) widest = std::max(widest, buffer.bytes);
    if (pays_to_export(widest)) refer_by_address(data, buffers);
  }

  // Whether one copy of so many bytes for a reader takes less time than two, where both are possible.
  bool pays_to_export(std::size_t bytes) const {
    if (call_.kind == Kind::broadcast) return shares_out_ || (size_ == 2 && bytes < kExportBytes);
    // The kernel's copies do not bypass the caches.
    if (call_.kind == Kind::all_gather && size_ > 2 && streams_) return false;
    return size_ == 2 || call_.kind == Kind::all_to_all || bytes >= kExportBytes;
  }

  // Part of a broadcast that is shared out between two ranks: the root writes one half, the other rank reads the other.
  bool work_on(std::size_t bytes) override {
    std::byte* own = call_.outputs[0].data + first_;
    if (self_ != call_.root) return read_chunk(call_.root, own, bytes, streams_);
    std::byte read_before_write{};
    return read_chunk(1 - self_, &read_before_write, 1, false) && write_chunk(1 - self_, own, bytes, streams_);
  }

  bool copy_own() {
    const Buffer& to = into(self_);
    const Buffer& from = *call_.given_to(self_, self_);
    std::size_t& copied = copied_[index(self_)];
    const std::size_t bytes = std::min(slice_bytes_, to.bytes - copied);
    copy(to.data + copied, from.data + copied, bytes, streams_);
    copied += bytes;
    complete_[index(self_)] = copied == to.bytes;
    return true;
  }

  bool copy_post(int source) {
    const std::byte* from = post_data(source) + table_bytes();
    for (int i = 0; has_table() && i < self_; ++i) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, post_data(source) + index(i) * sizeof bytes, sizeof bytes);
      from += round_up(bytes, kLine);
    }
    copy(into(source).data, from, into(source).bytes, false);
    return complete_[index(source)] = true;
  }

  // Copies a chunk of what the source refers to.
  bool copy_referred(int source) {
    const std::size_t first = copied_[index(source)];
    const std::size_t bytes = std::min(slice_bytes_, into(source).bytes - first);
    if (bytes > 0) {
      if (!begin_use(source)) return false;
      const bool read = read_referred(source, first, bytes);
      node_.end_use(source);
      if (!read) return false;
    }
    copied_[index(source)] += bytes;
    if (copied_[index(source)] < into(source).bytes) return true;
    take(kStream, source, others_[index(source)].rounds);
    node_.ring_doorbell();
    return complete_[index(source)] = true;
  }

  bool read_referred(int source, std::size_t first, std::size_t bytes) {
    const Buffer& to = into(source);
    const std::size_t number = has_table() ? index(self_) : 0;
    if (others_[index(source)].refers == Refers::to_regions) {
      const std::byte* from = referred(source, number, to.bytes);
      if (failure_) return false;
      copy(to.data + first, from + first, bytes, streams_);
      return true;
    }
    using Access = transport::PeerMemory::Access;
    const Access got = node_.memory()->read(source, to.data + first, referred_address(source, number) + first, bytes);
    if (got == Access::all) return true;
    if (got == Access::gone) {
      lose(source);
    } else {
      by_slots_[index(source)] = true;
      ask_for_slots(kStream, source);
    }
    return false;
  }

  bool offer() {
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

  // Replaces offer() where other ranks read this rank's buffer in place.
  bool wait_for_readers() {
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

  bool collect(int source) {
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

  bool needs_post(int position) const override {
    return shares_out_ || takes_from(position) || call_.kind == Kind::barrier;
  }
  void write_post(std::byte* data) override {
    if (shares_out_) return export_buffers(data, call_.outputs);
    if (!gives()) return;
    if (has_table()) data = write_table(data);
    if (own_.rounds > 0) return export_buffers(data, has_table() ? call_.inputs : std::span(&given(), 1));
    if (has_table()) return write_inputs(data);
    copy(data, given().data, given().bytes, false);
  }

  std::uint64_t expected_bytes(int position) const override {
    return call_.kind == Kind::broadcast || call_.kind == Kind::barrier ? 0 : into(position).bytes;
  }

  bool advance() override {
    if (mode_ == Mode::undecided) choose_mode(call_.outputs[0], 0, false);
    if (mode_ != Mode::not_in_place) return advance_in_place();
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

  bool done() const override {
    if (mode_ != Mode::not_in_place) return mode_ == Mode::done;
    return offered_ == own_.rounds && std::find(complete_.begin(), complete_.end(), false) == complete_.end();
  }

  bool waits_for(int position) const override {
    if (mode_ != Mode::not_in_place) return waits_in_place_for(position);
    if (!complete_[index(position)]) return true;
    if (offered_ == own_.rounds) return false;
    // A rank that has taken everything may have left the group while other ranks still read.
    if (node_.segment(position).done.load(std::memory_order_acquire) < node_.last_stream_call()) return true;
    return reads(kStream, position) && !has_taken(kStream, position, own_.rounds);
  }

  bool reads(Stream, int reader) const override { return call_.kind != Kind::gather || reader == call_.root; }

  const bool streams_;                    // the call is so large that its copies bypass the caches
  const std::size_t slice_bytes_;         // that a poll copies from one rank
  const bool shares_out_;                 // a broadcast of which each rank copies a part, if all tensors can be read
  std::uint32_t offered_ = 0;             // rounds
  std::vector<std::uint32_t> collected_;  // rounds, by position
  std::vector<std::size_t> copied_;       // bytes read in place, and of this rank's own block; by position
  std::vector<bool> by_slots_;            // this rank has asked that position for slots
  std::vector<bool> complete_;            // by position
};

}  // namespace

std::unique_ptr<Algorithm> make_shm_copy(const Call& call, const Paths& paths, Team) {
  return std::make_unique<ShmCopy>(call, paths.mesh, *paths.node);
}

}  // namespace netfold::collective
