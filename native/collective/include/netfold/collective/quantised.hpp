// All-reduce of f32 tensors as integers: i32, a sum with the same bits for every algorithm and order, and i8, a quarter
// of the bytes.
//
// Integer sums do not depend on the order of summation. So a ring, a tree, shared memory and a switch give the same
// bits, for any order of arrival. Rounding happens once at the source and once at the end. The number formats, their
// error bounds and the treatment of NaN and Inf: kernels/block_quantise.hpp and byte_quantise.hpp.
//
//   1. the largest magnitude of each block: a max over the group              all_reduce of ceil(n / 128) i32
//   2. the tensor, in units of its blocks, in its own memory                  all_reduce of n i32 or i8
//   3. back to floats, divided by the ranks for an average
//
// A byte has no bits left to count NaN and Inf. Where a block holds one, which all ranks know after step 1, step 2 runs
// as i32.
//
// With i8 the call may have a residual: inputs[0], as long as the tensor. It is added to this rank's contribution, and
// afterwards holds the rounding error of that contribution. If any value is non-finite, the residual becomes zero.
//
// Both sums run by the algorithm chosen for the call, each as a call of its own. Steps: twice that algorithm's. Bytes:
// i32 1 + 1/128 times that algorithm's, since f32 and i32 are equally wide; i8 1/4 + 1/128. Memory: 6 bytes for 128
// elements, and four passes over the tensor.
#pragma once

#include <netfold/collective/call_sequence.hpp>
#include <netfold/collective/registry.hpp>

namespace netfold::collective {

class Quantised final : public CallSequence {
 public:
  // Borrows the call, an all_reduce by sum of f32, and what the paths point to.
  Quantised(const Call& call, const Paths& paths);
  bool awaited_may_wait() const override;

 private:
  enum class Stage : std::uint8_t { begin, magnitudes, values };

  bool start_next() override;
  void end_step(const Algorithm& step) override;
  void find_magnitudes();
  void to_integers();
  void to_floats();
  void start(kernels::DType dtype, kernels::ReduceOp reduce, Buffer buffer);
  float* residual() const;

  const Call& call_;
  const Paths paths_;
  const int headroom_bits_;
  kernels::DType integers_;     // of the second sum
  Stage stage_ = Stage::begin;  // the step that runs
  std::vector<std::int32_t> magnitudes_;
  std::vector<std::int16_t> exponents_;  // of i32
};

}  // namespace netfold::collective
