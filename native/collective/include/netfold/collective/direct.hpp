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
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/collective/tensor_registrations.hpp>

#include <memory>

namespace netfold::collective {

class Direct final : public Algorithm {
 public:
  // Borrows call and mesh for its lifetime. A reduction allocates scratch of (P-1) times the output.
  Direct(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;

 private:
  void plan();
  void send_to(int position, const Buffer& buffer);
  void receive_from(int position, const Buffer& buffer);
  // Receives every other rank's contribution into scratch; `own` stays where it is.
  void gather_contributions(const Buffer& own);
  bool goes_by_rma(std::size_t bytes) const;
  void finish();

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  TensorRegistrations tensor_registrations_;
  std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<transport::Pipe::Scratch> registered_scratch_;  // replaces scratch_, where a fabric writes there
  std::vector<const void*> sources_;  // to reduce, in rank order; empty where nothing is reduced
};

}  // namespace netfold::collective
