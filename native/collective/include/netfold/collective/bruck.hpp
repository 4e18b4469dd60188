// Bruck's exchanges (Bruck et al., 1997): in ceil(log2 P) steps, to a partner twice as far away each time.
//
//   all_gather  step k: a rank sends the min(2^k, P-2^k) blocks that it has to the rank 2^k before it. n(P-1)/P bytes
//               in all, the least there can be; blocks may differ in size.
//   all_to_all  step k: every block that has bit k in the distance it has to go is passed on to the rank 2^k further:
//               about (n/2) log2 P bytes, more than any other way, in fewer messages. Equal blocks only: a rank that
//               passes blocks on knows no other sizes than its own.
//   barrier     step k: a rank tells the one 2^k further that all up to 2^k before it are there (the dissemination
//   barrier
//               of Hensgen, Finkel & Manber, 1988). A byte a step.
//
// A header a partner, a word a block.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Bruck final : public PipelinedPlan {
 public:
  // Borrows call and mesh for its life. P >= 2. all_to_all allocates twice its input.
  Bruck(const Call& call, transport::Mesh& mesh, Team team);

 private:
  void plan_all_gather();
  void plan_all_to_all();
  void plan_barrier();
  void after_first_sends() override;
  void finish() override;

  std::unique_ptr<std::byte[]> scratch_;
  std::byte word_{};                 // of a barrier: what travels
  std::vector<std::byte*> arrived_;  // all_to_all: the block for us from so many ranks before us
};

}  // namespace netfold::collective
