// Recursive halving-doubling all-reduce: vector halving with distance doubling, and back (Rabenseifner, 2004; Thakur et
// al., 2005, section 4.5).
//
// Of P ranks, Q = 2^floor(log2 P) run it: in step k a rank exchanges half of what it still holds with the one whose
// number differs in bit k, and folds; after log2 Q steps it owns n/Q finished values, and the same exchanges backwards
// spread them. 2 log2 Q steps, 2n(Q-1)/Q bytes sent a rank. The other P-Q ranks hand their n bytes to a neighbour first
// and get n back last: two steps more, and n more bytes for them and their neighbours.
//
// Order of summation: own + partner's, partner by partner in ascending distance, a folded-in rank's first. A narrower
// wire format is rounded at every exchange and once by a block's owner.
#pragma once

#include <netfold/collective/streams.hpp>

namespace netfold::collective {

class HalvingDoubling final : public Streams {
 public:
  // Borrows call and mesh for its life. Kind all_reduce only; P >= 2.
  HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team);

 private:
  // All of `what` after `after`; the mark of its last piece.
  Mark send_all(int position, Span what, Mark after, bool finished);
  Mark receive_all(int position, Span what, Mark after, bool fold);
};

}  // namespace netfold::collective
