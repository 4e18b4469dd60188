// Ring: every rank sends to the next and receives from the previous one (Patarasuk & Yuan, 2009).
//
//   reduce_scatter  P-1 steps; a rank sends n(P-1)/P of the n bytes that it gives (uneven: all blocks but its own)
//   all_gather      P-1 steps; n(P-1)/P of the n bytes that it gets (uneven: all blocks but the next rank's)
//   all_reduce      the two after each other in place: 2(P-1) steps, 2n(P-1)/P bytes, the least any host algorithm
//                   can send
//
// and a header a stream, a word a chunk. A block travels in chunks (chunks_of): what is received of one step is sent on
// in the next as soon as its chunk is reduced, so a step costs the latency of one chunk, not of one block.
//
// Order of summation: all_reduce folds block b from rank b up, round the ring; reduce_scatter folds rank b's block from
// rank b+1 up, round the ring. A wire format narrower than the tensor is rounded at every hop while sums travel, and
// once more by the owner of a finished block, so that every rank ends with the same bits.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Ring final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its life. P >= 2. reduce_scatter allocates a block of scratch and a little more.
  Ring(const Call& call, transport::Mesh& mesh, Team team);

 private:
  void plan_all_reduce();
  void plan_reduce_scatter();
  void plan_all_gather();
  void after_first_sends() override;

  std::unique_ptr<std::byte[]> slots_;  // partial sums on their way
};

}  // namespace netfold::collective
