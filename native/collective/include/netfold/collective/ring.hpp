// Ring: every rank sends to the next and receives from the previous one (Patarasuk & Yuan, 2009).
//
//   reduce_scatter  P-1 steps; a rank sends n(P-1)/P of its n bytes of input (uneven: all blocks but its own)
//   all_gather      P-1 steps; n(P-1)/P of the n bytes of output (uneven: all blocks but the next rank's)
//   all_reduce      both in sequence, in place: 2(P-1) steps, 2n(P-1)/P bytes, the minimum of any host algorithm
//
// and one header a stream, one marker a chunk. A block travels in chunks (chunks_of). A chunk that arrives in one step
// is sent on in the next step as soon as it is reduced, so a step costs the latency of one chunk and not of one block.
//
// Order of summation: all_reduce adds block b from rank b upwards, round the ring; reduce_scatter adds rank b's block
// from rank b+1 upwards, round the ring. In a wire format narrower than the tensor, partial sums are rounded at every
// hop. The owner of a finished block rounds the block too, so that every rank ends with the same bits.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Ring final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its lifetime. P >= 2. reduce_scatter allocates a block of scratch and a little more.
  Ring(const Call& call, transport::Mesh& mesh, Team team);

 private:
  void plan_all_reduce();
  void plan_reduce_scatter();
  void plan_all_gather();

  std::unique_ptr<std::byte[]> slots_;  // partial sums to send
};

}  // namespace netfold::collective
