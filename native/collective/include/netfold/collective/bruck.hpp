// Bruck's exchanges (Bruck et al., 1997): in ceil(log2 P) steps, to a partner twice as far away each time.
//
//   all_gather  step k: a rank sends its min(2^k, P-2^k) blocks to the rank 2^k positions before it. n(P-1)/P bytes in
//               all, the minimum; blocks may differ in size.
//   all_to_all  step k: a rank passes every block with bit k in its remaining distance to the rank 2^k positions ahead.
//               About (n/2) log2 P bytes, more than any other algorithm, in fewer messages. Equal blocks only: a rank
//               that passes blocks on knows only the sizes of its own.
//   barrier     step k: a rank sends to the rank 2^k positions ahead; after it, that rank knows that the 2^(k+1)-1
//               ranks before it have arrived (the dissemination barrier of Hensgen, Finkel & Manber, 1988). A byte a
//               step.
//
// Every partner gets one header, every block one marker.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Bruck final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its lifetime. P >= 2. all_to_all allocates twice its input.
  Bruck(const Call& call, transport::Mesh& mesh, Team team);

 private:
  void plan_all_gather();
  void plan_all_to_all();
  void plan_barrier();
  void finish() override;

  std::unique_ptr<std::byte[]> scratch_;
  std::byte token_{};                // a barrier's message
  std::vector<std::byte*> arrived_;  // all_to_all: this rank's blocks, by the distance they came
};

}  // namespace netfold::collective
