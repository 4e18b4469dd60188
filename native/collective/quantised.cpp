#include <netfold/collective/quantised.hpp>
#include <netfold/kernels/byte_quantise.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {

Quantised::Quantised(const Call& call, const Paths& paths)
    : call_(call),
      paths_(paths),
      headroom_bits_(kernels::headroom_bits_for(static_cast<std::size_t>(paths.mesh.size()))),
      integers_(call.wire) {}

float* Quantised::residual() const {
  return call_.inputs.empty() ? nullptr : reinterpret_cast<float*>(call_.inputs[0].data);
}

void Quantised::find_magnitudes() {
  std::byte* data = call_.outputs[0].data;
  if (const void* const error = residual()) {
    const void* const both[] = {data, error};
    kernels::reduce(kernels::ReduceOp::sum, kernels::DType::f32, data, both, 2, call_.elements());
  }
  magnitudes_.resize(kernels::quantise_block_count(call_.elements()));
  kernels::block_magnitudes(magnitudes_.data(), reinterpret_cast<const float*>(data), call_.elements());
}

void Quantised::to_integers() {
  std::byte* data = call_.outputs[0].data;
  const auto* floats = reinterpret_cast<const float*>(data);
  const auto is_finite = [](std::int32_t magnitude) { return magnitude < kernels::kNonFiniteMagnitude; };
  if (integers_ == kernels::DType::i8 && std::all_of(magnitudes_.begin(), magnitudes_.end(), is_finite)) {
    kernels::quantise_bytes(reinterpret_cast<std::int8_t*>(data), floats, residual(), call_.elements(),
                            magnitudes_.data(), kernels::byte_levels_for(paths_.mesh.size()),
                            kernels::rounding_key(call_.sequence, static_cast<std::uint32_t>(paths_.mesh.rank())));
    return;
  }
  integers_ = kernels::DType::i32;
  if (residual() != nullptr) std::memset(residual(), 0, call_.inputs[0].bytes);
  exponents_.resize(magnitudes_.size());
  kernels::block_exponents(exponents_.data(), magnitudes_.data(), magnitudes_.size());
  kernels::quantise(reinterpret_cast<std::int32_t*>(data), floats, call_.elements(), exponents_.data(), headroom_bits_);
}

void Quantised::to_floats() {
  std::byte* data = call_.outputs[0].data;
  auto* floats = reinterpret_cast<float*>(data);
  if (integers_ == kernels::DType::i8) {
    kernels::dequantise_bytes(floats, reinterpret_cast<const std::int8_t*>(data), call_.elements(), magnitudes_.data(),
                              kernels::byte_levels_for(paths_.mesh.size()));
  } else {
    kernels::dequantise(floats, reinterpret_cast<const std::int32_t*>(data), call_.elements(), exponents_.data(),
                        headroom_bits_);
  }
  if (call_.average) divide(call_.dtype, call_.outputs[0], paths_.mesh.size());
}

void Quantised::start(kernels::DType dtype, kernels::ReduceOp reduce, Buffer buffer) {
  step_call_ = call_;
  step_call_.dtype = step_call_.wire = dtype;
  step_call_.reduce = reduce;
  step_call_.average = false;
  step_call_.step_of = call_.step();
  step_call_.inputs.clear();
  step_call_.outputs = {buffer};
  step_ = make_algorithm(step_call_, paths_);
}

bool Quantised::start_next() {
  switch (stage_) {
    case Stage::begin:
      find_magnitudes();
      start(kernels::DType::i32, kernels::ReduceOp::max,
            {reinterpret_cast<std::byte*>(magnitudes_.data()), magnitudes_.size() * sizeof magnitudes_[0]});
      stage_ = Stage::magnitudes;
      return true;
    case Stage::magnitudes:
      to_integers();
      start(integers_, kernels::ReduceOp::sum,
            {call_.outputs[0].data, call_.elements() * kernels::element_bytes(integers_)});
      stage_ = Stage::values;
      return true;
    case Stage::values:
      break;
  }
  to_floats();
  return false;
}

void Quantised::end_step(const Algorithm& step) {
  if (step.substitute() != AlgorithmId::local) substitute_ = step.substitute();
}

// In the second sum every rank has begun the call.
bool Quantised::awaited_may_wait() const {
  return stage_ == Stage::values || (step_ != nullptr && step_->awaited_may_wait());
}

}  // namespace netfold::collective
