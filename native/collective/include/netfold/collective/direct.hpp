// Direct exchange: every rank sends what other ranks need straight to them, all at once; reductions follow locally.
//
// One step. Bytes sent by a rank of P, for n bytes of tensor:
//
//   all_reduce, all_gather      (P-1)n
//   reduce_scatter, all_to_all  (P-1)n/P
//   broadcast, scatter          the root (P-1)n
//   gather, reduce              n to the root
//   barrier                     a header to every rank
//
// Best for small messages (one latency), and a simple reference for all sizes. Reductions add in rank order, so every
// rank gets the same bits.
//
// The pairwise all_to_all is this exchange with one partner a step, in P-1 steps: in step s a rank sends to the rank s
// positions ahead and receives from the rank s positions behind. So all ranks never send to one rank together, which
// would cause losses at a switch's port. A rank sends the next block when the socket has this block and the previous
// block has arrived: the latency of one step overlaps the next step. The messages and their headers are the same, so
// ranks whose sizes differ may choose different algorithms of the two.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>

namespace netfold::collective {

class Direct final : public Algorithm {
 public:
  // Borrows call and mesh for its lifetime. A reduction allocates scratch of (P-1) times the output.
  Direct(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;

 private:
  // Of a paced exchange: blocks that a rank sends, and receives, at a time.
  static constexpr std::size_t kAtOnce = 2;

  void plan();
  void send_to(int position, const Buffer& buffer);
  void receive_from(int position, const Buffer& buffer);
  // Receives every other rank's contribution into scratch; `own` stays where it is.
  void gather_contributions(const Buffer& own);
  bool goes_by_rma(std::size_t bytes) const;
  // Messages below this index may travel now; of those to send, a paced exchange tries one at a time.
  std::size_t window_end(std::size_t messages) const {
    return is_paced_ ? std::min(messages, received_ + kAtOnce) : messages;
  }
  bool send();
  bool receive();
  void finish();

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  const bool is_paced_;
  bool begun_ = false;
  std::vector<Outgoing> outgoing_;  // by step
  std::vector<Incoming> incoming_;
  std::size_t sent_ = 0;      // all messages below are sent
  std::size_t received_ = 0;  // all messages below are received
  TensorRegistrations tensor_registrations_;
  transport::Pipe::Scratch scratch_;
  std::vector<const void*> sources_;  // to reduce, in rank order; empty where nothing is reduced
};

}  // namespace netfold::collective
