// All-reduce of f32 tensors as integers: i32, a sum with the same bits whatever runs it and in whatever order, and i8,
// a quarter of the bytes.
//
// Integer sums do not depend on the order of summation, so they are alike over a ring, a tree, shared memory or a
// switch, for any order of arrival; the rounding happens once at the source and once at the end. The numbers, their
// error bounds, and what becomes of NaN and Inf: kernels/block_quantise.hpp and byte_quantise.hpp.
//
//   1. the greatest magnitudes of the tensor's blocks: a max over the group    all_reduce of ceil(n / 128) i32
//   2. the tensor, in units of its blocks, in its own memory                   all_reduce of n i32 or i8
//   3. back to floats, divided by the ranks for an average
//
// A byte has no room to count NaN and Inf: where a block holds one, which all ranks know after the first step, the
// second goes as i32.
//
// With i8 the call may have a residual, inputs[0], as long as the tensor: it is added to this rank's contribution, and
// afterwards holds what rounding took from that. What non-finite values spoilt is not kept: it is zero then.
//
// Both sums run by the algorithm that was chosen for the call, each a call of its own. Steps: twice that algorithm's.
// Bytes: i32 1 + 1/128 times its, for f32 and i32 are equally wide; i8 1/4 + 1/128. Memory: 6 bytes for 128 elements,
// and four passes over the tensor.
#pragma once

#include <netfold/collective/registry.hpp>

namespace netfold::collective {

class Quantised final : public Algorithm {
 public:
  // Borrows the call, an all_reduce by sum of f32, and what the paths point to.
  Quantised(const Call& call, const Paths& paths);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  enum class Stage : std::uint8_t { begin, magnitudes, values };

  void find_magnitudes();
  void to_integers();
  void to_floats();
  void start(kernels::DType dtype, kernels::ReduceOp reduce, Buffer buffer);
  float* residual() const;

  const Call& call_;
  const Paths paths_;
  const int headroom_bits_;
  kernels::DType integers_;  // what the second sum adds
  Stage stage_ = Stage::begin;
  std::vector<std::int32_t> magnitudes_;
  std::vector<std::int16_t> exponents_;  // of i32
  Call step_call_;
  std::unique_ptr<Algorithm> step_;
};

}  // namespace netfold::collective
