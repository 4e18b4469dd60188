// Pairwise all_to_all: one partner a step instead of everybody at once.
//
// P-1 steps, n(P-1)/P bytes sent by a rank for n bytes of input (uneven: all but its own block) and a header a partner.
// In step s a rank sends to the one s ahead and receives from the one s behind, so that no rank is sent to by all
// others together, which costs losses at a switch's port. It sends the next block when this one is with the socket and
// the block before has come: a step's latency hides behind another step.
//
// The messages are those of a direct exchange, only paced, and say so: ranks whose sizes differ may choose differently.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/collective/tensor_registrations.hpp>

namespace netfold::collective {

class Pairwise final : public Algorithm {
 public:
  // Borrows call and mesh for its life. Kind all_to_all only.
  Pairwise(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;

 private:
  // Blocks on their way to or from this rank at a time.
  static constexpr std::size_t kAtOnce = 2;

  bool may_send() const { return sent_ < outgoing_.size() && sent_ < received_ + kAtOnce; }

  const Call& call_;
  transport::Mesh& mesh_;
  std::size_t self_;
  bool begun_ = false;
  TensorRegistrations tensor_registrations_;
  std::vector<Outgoing> outgoing_;  // by step
  std::vector<Incoming> incoming_;
  std::size_t sent_ = 0;
  std::size_t received_ = 0;  // the steps below have all come
};

}  // namespace netfold::collective
