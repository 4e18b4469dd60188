// Recursive halving-doubling all-reduce: vector halving with distance doubling, and back (Rabenseifner, 2004; Thakur et
// al., 2005, section 4.5).
//
// Of P ranks, Q = 2^floor(log2 P) run it: in step k a rank exchanges half of what it still holds with the one whose
// number differs in bit k, and folds; after log2 Q steps it owns n/Q finished values, and the same exchanges backwards
// spread them. 2 log2 Q steps, 2n(Q-1)/Q bytes sent a rank. The other P-Q ranks hand their n bytes to a neighbour first
// and get n back last: two steps more, and n more bytes for them and their neighbours.
//
// The two halves of it, with the far partner first and last, so that every rank ends with, or starts from, its own
// block:
//
//   reduce_scatter  recursive halving: in each step a rank hands over its sums for the other half of the ranks that are
//                   left. log2 Q steps, n(Q-1)/Q bytes.
//   all_gather      recursive doubling: in each step two partners swap all blocks that they have. log2 Q steps,
//   n(Q-1)/Q
//                   bytes.
//
// Ranks that stand beside the Q hand over what they give first, and get what they want last: two steps more, and the
// whole n once (reduce_scatter: there; all_gather: back). Blocks may differ in size.
//
// Order of summation: own + partner's, partner by partner, a folded-in rank's first; all_reduce in ascending distance,
// reduce_scatter in descending distance. A narrower wire format is rounded at every exchange and once by a block's
// owner.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class HalvingDoubling final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its life. P >= 2. reduce_scatter allocates half of its input, or, for a rank that others
  // hand theirs to, all of it.
  HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team);

 private:
  // A rank's block on its way: where it is, and, a chunk each, when it is there.
  struct Block {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::vector<Mark> here;
  };

  void plan_all_reduce();
  void plan_reduce_scatter();
  void plan_all_gather();
  void after_first_sends() override;
  // Of the numbers [first, last) of those that run it: their ranks, which follow each other.
  Span ranks_of(int first, int last) const;
  bool is_paired() const { return team().position() < 2 * extra_; }
  bool hands_over() const { return is_paired() && team().position() % 2 == 0; }
  int position_of(int number) const { return number < extra_ ? 2 * number + 1 : number + extra_; }
  Block block(const Buffer& buffer) const;
  void send_block(int position, const Block& block);
  // `fold`: into = block + arrived, and there the block is from then on.
  void receive_block(int position, Block& block, std::byte* into, bool reduces);
  // All of `what` after `after`; the mark of its last chunk.
  Mark send_all(int position, Span what, Mark after, bool finished);
  Mark receive_all(int position, Span what, Mark after, bool reduces);

  int core_ = 1;    // Q
  int extra_ = 0;   // P-Q: the first 2(P-Q) ranks stand in pairs, the even one hands over to the odd one
  int number_ = 0;  // of this rank among the Q, or of the one that it hands over to
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace netfold::collective
