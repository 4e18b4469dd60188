// Chain broadcast: the root sends to the next rank, which sends on what it has, piece by piece.
//
// P-1 hops of a piece each (pipeline_pieces_of), then a piece's time a piece: n bytes sent a rank, none by the last; no
// broadcast takes less for large n and few ranks.
#pragma once

#include <netfold/collective/streams.hpp>

namespace netfold::collective {

class Chain final : public Streams {
 public:
  // Borrows call and mesh for its life. Kind broadcast only; P >= 2.
  Chain(const Call& call, transport::Mesh& mesh, Team team);
};

}  // namespace netfold::collective
