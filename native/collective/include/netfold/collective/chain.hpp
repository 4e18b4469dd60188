// Chain broadcast: the root sends to the next rank, which passes each chunk on to the rank after it.
//
// The first chunk takes P-1 hops; then one chunk arrives in each chunk's time (pipeline_chunks_of). Every rank but the
// last sends n bytes. No broadcast takes less time for large n and few ranks.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

namespace netfold::collective {

class Chain final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its lifetime. Kind broadcast only; P >= 2.
  Chain(const Call& call, transport::Mesh& mesh, Team team);
};

}  // namespace netfold::collective
