// Chain broadcast: the root sends to the next rank, which sends on what it has, chunk by chunk.
//
// P-1 hops of a chunk each (pipeline_chunks_of), then a chunk's time a chunk: n bytes sent a rank, none by the last; no
// broadcast takes less for large n and few ranks.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

namespace netfold::collective {

class Chain final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its life. Kind broadcast only; P >= 2.
  Chain(const Call& call, transport::Mesh& mesh, Team team);
};

}  // namespace netfold::collective
