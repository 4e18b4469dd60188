// Calls in which every rank of a host works on a part of the tensors of all ranks, in place: rank d on part d.
//
// The tensors lie in shared memory, or are read and written by address (transport/shm/peer_memory.hpp). Where any is
// reached by address, all ranks first tell whether they can read all tensors; if one cannot, no rank works in place.
#pragma once

#include <netfold/collective/shm_collective.hpp>

#include <optional>

namespace netfold::collective {

class ShmInPlace : public ShmCollective {
 protected:
  ShmInPlace(const Call& call, transport::Mesh& mesh, Node& node) : ShmCollective(call, mesh, node) {}

  enum class Mode : std::uint8_t { undecided, not_in_place, telling_access, working, waiting, done };
  // Another rank's tensor.
  struct Tensor {
    std::byte* data = nullptr;  // null: not mapped here
    std::uint64_t address = 0;  // in its process
  };

  // Does the work for the bytes [first_, first_ + bytes) of all tensors. False, with `failure_`, where it cannot.
  virtual bool work_on(std::size_t bytes) = 0;

  // Decides once, from the posts of all ranks, whether the call runs in place.
  // tensor: this rank's. number: of the references in the other ranks' posts that this rank works on.
  // whole: this rank's part is the whole tensor.
  void choose_mode(const Buffer& tensor, std::size_t number, bool whole);
  // The call's advance(), done() and waits_for() where mode_ is decided and not not_in_place.
  bool advance_in_place();
  bool waits_in_place_for(int position) const;

  // The bytes of a buffer that each rank works on: whole lines; the last ranks get the rest.
  std::size_t share_bytes(std::size_t bytes) const {
    return round_up((bytes + index(size_) - 1) / index(size_), kLine);
  }
  // Read and write at `first_` of a rank's tensor. False, with `failure_`, where that is not possible any more.
  // streams: where the tensor is mapped; see kernels::copy.
  bool read_chunk(int position, std::byte* into, std::size_t bytes, bool streams);
  // Precondition where the tensor is not mapped: this rank has just read from `position`.
  bool write_chunk(int position, const std::byte* from, std::size_t bytes, bool streams);

  Mode mode_ = Mode::undecided;
  std::size_t first_ = 0;        // the next byte of this rank's part
  std::vector<Tensor> tensors_;  // by position

 private:
  // The end of each rank's part. No slots are used in place.
  static constexpr auto kEnds = Node::Stream::to_reduce;

  std::optional<bool> try_access();
  bool check(transport::PeerMemory::Access access, int position, const char* what);

  std::size_t end_ = 0;  // of this rank's part
  std::size_t chunk_bytes_ = 0;
};

}  // namespace netfold::collective
