#include <netfold/collective/direct.hpp>
#include <netfold/collective/quantised.hpp>
#include <netfold/kernels/block_quantise.hpp>

#include <algorithm>

namespace netfold::collective {

Quantised::Quantised(const Call& call, const Paths& paths)
    : call_(call),
      paths_(paths),
      headroom_bits_(kernels::headroom_bits_for(static_cast<std::size_t>(paths.mesh.size()))) {}

void Quantised::find_exponents() {
  exponents_.resize(kernels::quantise_block_count(call_.elements()));
  kernels::block_exponents(exponents_.data(), reinterpret_cast<const float*>(call_.outputs[0].data), call_.elements());
  maxima_.assign(exponents_.begin(), exponents_.end());
}

void Quantised::to_integers() {
  std::transform(maxima_.begin(), maxima_.end(), exponents_.begin(),
                 [](std::int32_t exponent) { return static_cast<std::int16_t>(exponent); });
  std::byte* data = call_.outputs[0].data;
  kernels::quantise(reinterpret_cast<std::int32_t*>(data), reinterpret_cast<const float*>(data), call_.elements(),
                    exponents_.data(), headroom_bits_);
}

void Quantised::to_floats() {
  std::byte* data = call_.outputs[0].data;
  kernels::dequantise(reinterpret_cast<float*>(data), reinterpret_cast<const std::int32_t*>(data), call_.elements(),
                      exponents_.data(), headroom_bits_);
  if (call_.average) divide(call_.dtype, call_.outputs[0], paths_.mesh.size());
}

void Quantised::start(kernels::ReduceOp reduce, Buffer buffer) {
  step_call_ = call_;
  step_call_.dtype = step_call_.wire = kernels::DType::i32;
  step_call_.reduce = reduce;
  step_call_.average = false;
  step_call_.step_of = static_cast<std::uint8_t>(1 + static_cast<int>(call_.kind));
  step_call_.outputs = {buffer};
  step_ = make_algorithm(step_call_, paths_);
}

Progress Quantised::poll(std::int64_t now_ns) {
  bool moved = false;
  for (;;) {
    if (step_ != nullptr) {
      const Progress progress = step_->poll(now_ns);
      if (progress == Progress::failed) return fail(step_->failure());
      if (progress != Progress::done) return moved ? Progress::moved : progress;
      wire_bytes_ += step_->wire_bytes();
      retransmissions_ += step_->retransmissions();
      if (step_->slowest_rank() >= 0) slowest_rank_ = step_->slowest_rank();
      if (step_->instead() != AlgorithmId::local) instead_ = step_->instead();
      step_.reset();
    }
    moved = true;
    switch (stage_) {
      case Stage::begin:
        find_exponents();
        start(kernels::ReduceOp::max,
              {reinterpret_cast<std::byte*>(maxima_.data()), maxima_.size() * sizeof maxima_[0]});
        stage_ = Stage::exponents;
        break;
      case Stage::exponents:
        to_integers();
        start(kernels::ReduceOp::sum, call_.outputs[0]);
        stage_ = Stage::values;
        break;
      case Stage::values:
        to_floats();
        return Progress::done;
    }
  }
}

void Quantised::wait_for(WaitSet& set) const {
  if (step_ != nullptr) step_->wait_for(set);
}

std::vector<int> Quantised::awaited() const { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

// In the second sum everybody has at least begun.
bool Quantised::awaited_may_wait() const {
  return stage_ == Stage::values || (step_ != nullptr && step_->awaited_may_wait());
}

}  // namespace netfold::collective
