// Copies among ranks that share memory: broadcast, all_gather, gather, scatter, all_to_all; and barrier.
//
// Few bytes from a rank (<= 16 KB for all its readers): they lie in the rank's post, and the readers copy them from
// there (one step). More bytes go through the slots of the rank's stream, 256 KB per round. In broadcast, all_gather and
// gather every reader copies the whole slot; in scatter and all_to_all a slot has a part for each reader. Ranks may
// differ in this, as they may differ in bytes. Where the buffer lies in shared memory, or ranks may read each other's
// memory, the readers copy straight from the buffer, once. A reader that cannot read the buffer after all (a device's
// memory) asks for slots.
//
// Bytes on the wire: none. Memory traffic: each reader copies each byte once; with slots, the owner copies each byte
// into a slot first.
#pragma once

#include <netfold/collective/shm_collective.hpp>

namespace netfold::collective {

class ShmCopy final : public ShmCollective {
 public:
  ShmCopy(const Call& call, transport::Mesh& mesh, transport::ShmNode& node);

 private:
  struct Part {
    std::size_t in_slot = 0;
    std::size_t first = 0;  // of the buffer
    std::size_t bytes = 0;
  };
  // The bytes that `reader` takes of a round, where it takes `bytes` in all.
  Part part(std::uint32_t round, int reader, std::size_t bytes) const;
  // Every rank that gives anything gives something to the root.
  bool gives() const { return call_.given_to(self_, call_.root) != nullptr; }
  // The bytes that this rank gives to all readers, where it has no block for each.
  const Buffer& given() const { return *call_.given_to(self_, call_.root); }
  bool takes_from(int source) const { return call_.taken_from(self_, source) != nullptr; }
  // The place for the data from `source`.
  const Buffer& into(int source) const { return *call_.taken_from(self_, source); }
  // Refers to what this rank gives, if the other ranks can read it in place.
  void export_buffers(std::byte* data, std::span<const Buffer> buffers);
  // Whether one copy of so many bytes for a reader takes less time than two, where both are possible.
  bool pays_to_export(std::size_t bytes) const;
  bool copy_own();
  bool copy_post(int source);
  // Copies a chunk of what the source refers to.
  bool copy_referred(int source);
  bool read_chunk(int source, std::size_t first, std::size_t bytes);
  bool offer();
  // Replaces offer() where other ranks read this rank's buffer in place.
  bool wait_for_readers();
  bool collect(int source);

  bool needs_post(int position) const override;
  void write_post(std::byte* data) override;
  std::uint64_t expected_bytes(int position) const override;
  bool advance() override;
  bool done() const override;
  bool waits_for(int position) const override;
  bool reads(Stream stream, int reader) const override;

  const bool streams_;                    // the call is so large that its copies bypass the caches
  std::uint32_t offered_ = 0;             // rounds
  std::vector<std::uint32_t> collected_;  // rounds, by position
  std::vector<std::size_t> copied_;       // bytes read in place, and of this rank's own block; by position
  std::vector<bool> by_slots_;            // this rank has asked that position for slots
  std::vector<bool> complete_;            // by position
};

}  // namespace netfold::collective
