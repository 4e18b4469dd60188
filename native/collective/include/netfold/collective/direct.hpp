// Direct exchange: every rank sends what others need straight to them, all at once; reductions follow
// locally.
//
// One step. Bytes sent by a rank of P, for n bytes of tensor:
//   all_reduce (P-1)n   all_gather (P-1)n   reduce_scatter, all_to_all (P-1)n/P   broadcast, scatter: the
//   root (P-1)n gather, reduce: n to the root           barrier: a header to everyone
// Best for small messages (one latency) and plainly right for all; reductions fold in rank order, so every
// rank gets the same bits.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/collective/tensor_registrations.hpp>

#include <memory>

namespace netfold::collective {

class Direct final : public Algorithm {
 public:
  // Borrows call and mesh for its life. Allocates scratch for what must be reduced: (P-1) times the output.
  Direct(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;

 private:
  void plan();
  void send_to(int position, const Buffer& buffer);
  void receive_from(int position, const Buffer& buffer);
  bool goes_by_rma(std::size_t bytes) const;
  void finish();

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  TensorRegistrations tensor_registrations_;
  std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<transport::Pipe::Scratch> known_scratch_;  // in its place, where a fabric writes there
  std::vector<const void*> sources_;                         // to reduce, in rank order; empty where nothing is reduced
};

// Divide a float buffer by `ranks`: the second half of an average.
void divide(kernels::DType dtype, const Buffer& buffer, int ranks);

}  // namespace netfold::collective
