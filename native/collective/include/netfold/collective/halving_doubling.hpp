// Recursive halving-doubling all-reduce: vector halving with distance doubling, and back (Rabenseifner, 2004; Thakur et
// al., 2005, section 4.5).
//
// Of P ranks, Q = 2^floor(log2 P) form the core. In step k a core rank exchanges half of the elements that it still
// holds with the core rank whose number differs in bit k, and reduces. After log2 Q steps it owns n/Q final values, and
// the same exchanges backwards spread them. 2 log2 Q steps, 2n(Q-1)/Q bytes sent a rank. Each of the other P-Q ranks
// first hands its n bytes to a neighbour in the core, and gets n bytes back last: two steps more, and n more bytes for
// it and its neighbour.
//
// The two halves of it, with the distant partner first and last, so that every rank ends with, or starts from, its own
// block:
//
//   reduce_scatter  recursive halving: in each step a rank sends its sums for the other half of the remaining ranks.
//                   log2 Q steps, n(Q-1)/Q bytes.
//   all_gather      recursive doubling: in each step two partners swap all blocks that they have. log2 Q steps,
//                   n(Q-1)/Q bytes.
//
// Ranks outside the core hand over their inputs first and get their outputs last: two steps more, and the whole n once
// (reduce_scatter: on the way in; all_gather: on the way back). Blocks may differ in size.
//
// Order of summation: own + partner's, partner by partner; the contribution of a rank outside the core comes first.
// all_reduce goes in ascending distance, reduce_scatter in descending distance. A narrower wire format is rounded at
// every exchange and once by a block's owner.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class HalvingDoubling final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its lifetime. P >= 2. reduce_scatter allocates half of its input; a rank with a neighbour
  // outside the core allocates as much as its whole input.
  HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team);

 private:
  // A rank's block: its current place, and for each chunk the mark that is reached when the chunk is there.
  struct Block {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::vector<Mark> received;
  };

  void plan_all_reduce();
  void plan_reduce_scatter();
  void plan_all_gather();
  // The consecutive ranks of the core numbers [first, last), with their neighbours outside the core.
  Span ranks_of(int first, int last) const;
  bool is_paired() const { return team().position() < 2 * extra_; }
  bool hands_over() const { return is_paired() && team().position() % 2 == 0; }
  int position_of(int number) const { return number < extra_ ? 2 * number + 1 : number + extra_; }
  Buffer half(const Buffer& buffer, std::size_t index) const { return part(buffer, 2, index, element_bytes()); }
  // A block in place, with all chunks there at `after`.
  Block block(const Buffer& buffer, Mark after = {}) const;
  void send_block(int position, const Block& block, bool finished = false);
  // Moves the block to `into`; `reduces`: into = block + arrived.
  void receive_block(int position, Block& block, std::byte* into, bool reduces);
  // Receives all chunks of `range` in place, each after `after`. Returns the mark of the last chunk.
  Mark receive_all(int position, const Buffer& range, Mark after, bool reduces);

  int core_ = 1;    // Q
  int extra_ = 0;   // P-Q: the first 2(P-Q) ranks form pairs; the even one hands over to the odd one
  int number_ = 0;  // the core number of this rank, or of the rank that it hands over to
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace netfold::collective
