// Copies among ranks that share memory: broadcast, all_gather, gather, scatter, all_to_all; and barrier.
//
// Few bytes from a rank (<= 16 KB for all its readers): they stand in its post, and the readers copy them from there
// (one step). More: they go through the slots of its stream, 256 KB a round: for broadcast, all_gather and gather
// every reader copies all of a slot; for scatter and all_to_all a slot has a part for each reader. Ranks may differ in
// this, as they may differ in bytes. More, and in shared memory: the readers copy straight from the buffer, once.
//
// Bytes on the wire: none. Memory traffic: each byte is copied into a slot once and out once by each of its readers.
#pragma once

#include <netfold/collective/shared_call.hpp>

namespace netfold::collective {

class SharedCopy final : public SharedCall {
 public:
  SharedCopy(const Call& call, transport::Mesh& mesh, transport::SharedNode& node);

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
  void copy_own();
  bool copy_post(int source);
  bool copy_referred(int source);
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

  std::uint32_t offered_ = 0;             // rounds
  std::vector<std::uint32_t> collected_;  // by position
  std::vector<bool> complete_;            // by position
  std::size_t part_bytes_;                // of a slot, where there is a buffer for each rank
};

}  // namespace netfold::collective
