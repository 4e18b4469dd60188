// Pairwise all_to_all: one partner a step instead of all ranks at once.
//
// P-1 steps, n(P-1)/P bytes sent by a rank for n bytes of input (uneven: all but its own block) and a header a partner.
// In step s a rank sends to the rank s positions ahead and receives from the rank s positions behind. So all ranks
// never send to one rank together, which would cause losses at a switch's port. A rank sends the next block when the
// socket has this block and the previous block has arrived: the latency of one step overlaps the next step.
//
// The messages are those of a paced direct exchange, and their headers say direct: ranks whose sizes differ may choose
// different algorithms of the two.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/collective/tensor_registrations.hpp>

namespace netfold::collective {

class Pairwise final : public Algorithm {
 public:
  // Borrows call and mesh for its lifetime. Kind all_to_all only.
  Pairwise(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;

 private:
  // Blocks that this rank sends, and receives, at a time.
  static constexpr std::size_t kAtOnce = 2;

  bool may_send() const { return sent_ < outgoing_.size() && sent_ < received_ + kAtOnce; }

  const Call& call_;
  transport::Mesh& mesh_;
  int self_;
  bool begun_ = false;
  TensorRegistrations tensor_registrations_;
  std::vector<Outgoing> outgoing_;  // by step
  std::vector<Incoming> incoming_;
  std::size_t sent_ = 0;
  std::size_t received_ = 0;  // all steps below are received
};

}  // namespace netfold::collective
