// Copies among ranks that share memory: broadcast, all_gather, gather, scatter, all_to_all; and barrier.
//
// Few bytes from a rank (<= 16 KB for all its readers): they stand in its post, and the readers copy them from there
// (one step). More: they go through the slots of its stream, 256 KB a round: for broadcast, all_gather and gather
// every reader copies all of a slot; for scatter and all_to_all a slot has a part for each reader. Ranks may differ in
// this, as they may differ in bytes. More, and in shared memory or where ranks may read each other's: the readers copy
// straight from the buffer, once. What a reader cannot read there after all (a device's memory), it asks to have
// through slots.
//
// Bytes on the wire: none. Memory traffic: each byte is copied once by each of its readers; where slots are the way,
// into one once before.
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
  // What `reader` takes of a round, `bytes` being all that it takes.
  Part part(std::uint32_t round, int reader, std::size_t bytes) const;
  bool gives() const;
  bool takes_from(int source) const;
  // Where what comes from `source` goes.
  const Buffer& into(int source) const;
  // What this rank gives to everybody alike.
  const Buffer& given() const;
  // Refers to what this rank gives, if it lies where the others can read it.
  void export_buffers(std::byte* data, std::span<const Buffer> buffers);
  // Whether one copy of so many bytes for a reader takes less time than two, where both can be had.
  bool pays_to_export(std::size_t bytes) const;
  bool copy_own();
  bool copy_post(int source);
  // A chunk of what the source refers to.
  bool copy_referred(int source);
  bool read_chunk(int source, std::size_t first, std::size_t bytes);
  bool offer();
  // In place of an offer, where the others read this rank's buffer itself.
  bool wait_for_readers();
  bool collect(int source);

  bool needs_post(int position) const override;
  void write_post(std::byte* data) override;
  std::uint64_t expected_bytes(int position) const override;
  bool advance() override;
  bool done() const override;
  bool waits_for(int position) const override;
  bool reads(Stream stream, int reader) const override;

  const bool streams_;                    // so much is copied that it goes past the caches
  std::uint32_t offered_ = 0;             // rounds
  std::vector<std::uint32_t> collected_;  // by position
  std::vector<std::size_t> copied_;       // bytes of what they refer to, and of this rank's own; by position
  std::vector<bool> by_slots_;            // they refer to it, but it must come through slots; by position
  std::vector<bool> complete_;            // by position
  std::size_t part_bytes_;                // of a slot, where there is a buffer for each rank
};

}  // namespace netfold::collective
