// All-reduce of f32 tensors as integers: i32, a sum with the same bits for every algorithm and order, and i8, a quarter
// of the bytes.
//
// Integer sums do not depend on the order of summation. So a ring, a tree, shared memory and a switch give the same
// bits, for any order of arrival. Rounding happens once at the source and once at the end. The number formats, their
// error bounds and the treatment of NaN and Inf: kernels/block_quantise.hpp and byte_quantise.hpp.
//
//   1. the largest magnitude of each block: a max over the group              all_reduce of ceil(n / 128) i32
//   2. the tensor, in units of its blocks, in its own memory                  all_reduce of n i32 or i8
//   3. back to floats; of an average, divided by the ranks before the one rounding
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
#include <netfold/collective/call_sequence.hpp>
#include <netfold/collective/slice.hpp>
#include <netfold/kernels/byte_quantise.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class Quantised final : public CallSequence {
 public:
  // call: an all_reduce by sum of f32.
  Quantised(const Call& call, const Paths& paths)
      : call_(call),
        paths_(paths),
        headroom_bits_(kernels::headroom_bits_for(static_cast<std::size_t>(paths.mesh.size()))),
        integers_(call.wire) {}

  float* residual() const { return call_.inputs.empty() ? nullptr : reinterpret_cast<float*>(call_.inputs[0].data); }

  // In the second sum every rank has begun the call.
  bool awaited_may_wait() const override {
    return stage_ == Stage::values || (step_ != nullptr && step_->awaited_may_wait());
  }

 private:
  enum class Stage : std::uint8_t { begin, magnitudes, values };
  // Elements that a poll converts: whole blocks. A conversion takes several times as long as a copy.
  static constexpr std::size_t kSliceElements = kSliceBytes / 4 / sizeof(float);
  static_assert(kSliceElements % kernels::kQuantiseBlock == 0);
  struct Slice {
    std::size_t first;
    std::size_t count;
    std::size_t block() const { return first / kernels::kQuantiseBlock; }
  };

  bool start_next() override {
    switch (stage_) {
      case Stage::begin:
        if (slice_ == 0) magnitudes_.resize(kernels::quantise_block_count(call_.elements()));
        if (!pass([this](const Slice& slice) { find_magnitudes(slice); })) return true;
        start(kernels::DType::i32, kernels::ReduceOp::max,
              {reinterpret_cast<std::byte*>(magnitudes_.data()), magnitudes_.size() * sizeof magnitudes_[0]});
        stage_ = Stage::magnitudes;
        return true;
      case Stage::magnitudes:
        if (slice_ == 0) choose_integers();
        if (!pass([this](const Slice& slice) { to_integers(slice); })) return true;
        start(integers_, kernels::ReduceOp::sum,
              {call_.outputs[0].data, call_.elements() * kernels::element_bytes(integers_)});
        stage_ = Stage::values;
        return true;
      case Stage::values:
        break;
    }
    return !pass([this](const Slice& slice) { to_floats(slice); }, true);
  }

  void end_step(const Algorithm& step) override {
    if (step.substitute() != AlgorithmId::local) substitute_ = step.substitute();
  }

  // Visits the next slice of the tensor. True: it was the last one of the pass.
  template <class Visit>
  bool pass(const Visit& visit, bool from_the_end = false) {
    const std::size_t slices = (call_.elements() + kSliceElements - 1) / kSliceElements;
    const std::size_t first = (from_the_end ? slices - 1 - slice_ : slice_) * kSliceElements;
    visit(Slice{first, std::min(kSliceElements, call_.elements() - first)});
    slice_ = (slice_ + 1) % slices;
    return slice_ == 0;
  }

  float* floats(const Slice& slice) const { return reinterpret_cast<float*>(call_.outputs[0].data) + slice.first; }
  template <class Integer>
  Integer* integers(const Slice& slice) const {
    return reinterpret_cast<Integer*>(call_.outputs[0].data) + slice.first;
  }

  void find_magnitudes(const Slice& slice) {
    float* const values = floats(slice);
    if (residual() != nullptr) {
      const void* const both[] = {values, residual() + slice.first};
      kernels::reduce(kernels::ReduceOp::sum, kernels::DType::f32, values, both, 2, slice.count);
    }
    kernels::block_magnitudes(magnitudes_.data() + slice.block(), values, slice.count);
  }

  void choose_integers() {
    const auto is_finite = [](std::int32_t magnitude) { return magnitude < kernels::kNonFiniteMagnitude; };
    if (!std::all_of(magnitudes_.begin(), magnitudes_.end(), is_finite)) integers_ = kernels::DType::i32;
    if (integers_ == kernels::DType::i32) exponents_.resize(magnitudes_.size());
  }

  // Slices from the first on: bytes never overwrite floats of a later slice.
  void to_integers(const Slice& slice) {
    const std::int32_t* const magnitudes = magnitudes_.data() + slice.block();
    float* const errors = residual() == nullptr ? nullptr : residual() + slice.first;
    if (integers_ == kernels::DType::i8) {
      kernels::quantise_bytes(integers<std::int8_t>(slice), floats(slice), errors, slice.count, magnitudes,
                              kernels::byte_levels_for(paths_.mesh.size()),
                              kernels::rounding_key(call_.sequence, static_cast<std::uint32_t>(paths_.mesh.rank())),
                              slice.block());
      return;
    }
    if (errors != nullptr) std::fill_n(errors, slice.count, 0.0f);
    std::int16_t* const exponents = exponents_.data() + slice.block();
    kernels::block_exponents(exponents, magnitudes, kernels::quantise_block_count(slice.count));
    kernels::quantise(integers<std::int32_t>(slice), floats(slice), slice.count, exponents, headroom_bits_);
  }

  // Slices from the last on: floats never overwrite bytes of an earlier slice.
  void to_floats(const Slice& slice) {
    const int ranks = call_.average == Averaging::none ? 1 : paths_.mesh.size();
    if (integers_ == kernels::DType::i8) {
      kernels::dequantise_bytes(floats(slice), integers<std::int8_t>(slice), slice.count,
                                magnitudes_.data() + slice.block(),
                                kernels::byte_levels_for(paths_.mesh.size()) * ranks);
    } else {
      kernels::dequantise(floats(slice), integers<std::int32_t>(slice), slice.count, exponents_.data() + slice.block(),
                          headroom_bits_, static_cast<std::uint32_t>(ranks));
    }
  }

  void start(kernels::DType dtype, kernels::ReduceOp reduce, Buffer buffer) {
    step_call_ = call_;
    step_call_.dtype = step_call_.wire = dtype;
    step_call_.reduce = reduce;
    step_call_.average = Averaging::none;
    step_call_.step_of = call_.step();
    step_call_.inputs.clear();
    step_call_.outputs = {buffer};
    step_ = make_algorithm(step_call_, paths_);
  }

  const Call& call_;
  const Paths paths_;
  const int headroom_bits_;
  kernels::DType integers_;     // of the second sum
  Stage stage_ = Stage::begin;  // the step that runs
  std::size_t slice_ = 0;       // the next of a pass
  std::vector<std::int32_t> magnitudes_;
  std::vector<std::int16_t> exponents_;  // of i32
};

}  // namespace

std::unique_ptr<Algorithm> make_quantised(const Call& call, const Paths& paths) {
  return std::make_unique<Quantised>(call, paths);
}

}  // namespace netfold::collective
