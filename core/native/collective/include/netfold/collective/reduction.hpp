// A reducing algorithm merges values that meet by the call's operator, or into an average.
//
// An average is a merge of partial means (kernels/reduce.hpp). A rank's tensor is the partial mean of as many ranks as
// Call::ranks_in says. Where a call reduces in one place, all tensors meet there, and floats are rounded once. Where
// sums go from rank to rank, every sum is a term of the whole average, so that none overflows, and the last reduction
// divides.
#pragma once

#include <netfold/collective/call.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/kernels/reduce.hpp>

#include <span>

namespace netfold::collective {

class Reduction {
 public:
  // members: a Team, or the ranks that share memory.
  template <class Members>
  Reduction(const Call& call, const Members& members) : call_(call) {
    if (call.average == Averaging::none) return;
    for (int i = 0; i < members.size(); ++i) ranks_ += call.ranks_in(members.rank(i));
    for (int i = 0; i < members.size(); ++i) {
      scales_.push_back(kernels::mean_scale(call.ranks_in(members.rank(i)), ranks_));
    }
  }

  // Reduces the tensors of all positions.
  void reduce(void* into, std::span<const void* const> sources, std::size_t count) const {
    merge(into, sources, scales_, count, true);
  }
  // Reduces two values, of which each is a tensor, of the rank at a position, or a sum (kSum). finishes: the result is
  // the call's.
  static constexpr int kSum = -1;
  void merge(void* into, const void* first, int first_of, const void* second, int second_of, std::size_t count,
             bool finishes) const {
    const void* const sources[2] = {first, second};
    const float scales[2] = {scale_of(first_of), scale_of(second_of)};
    merge(into, sources, scales, count, finishes);
  }

  // Of an average, where other code adds: the factor of a tensor that takes part, and whether the sum of all must be
  // divided.
  float scale_of(int position) const {
    return position == kSum || scales_.empty() ? 1.0f : scales_[static_cast<std::size_t>(position)];
  }
  void scale(int position, void* into, const void* from, std::size_t count) const {
    const float scale = scale_of(position);
    kernels::average(call_.dtype, into, &from, 1, count, {.scales = &scale});
  }
  bool divides() const { return call_.average == Averaging::whole; }
  void divide(void* into, const void* from, std::size_t count) const { merge(into, {&from, 1}, kWhole, count, true); }

 private:
  static constexpr float kWhole[1] = {1.0f};

  void merge(void* into, std::span<const void* const> sources, std::span<const float> scales, std::size_t count,
             bool finishes) const {
    if (call_.average == Averaging::none) {
      kernels::reduce(call_.reduce, call_.dtype, into, sources.data(), sources.size(), count);
      return;
    }
    const bool divides_now = finishes && divides();
    kernels::average(call_.dtype, into, sources.data(), sources.size(), count,
                     {.scales = scales.data(), .ranks = divides_now ? ranks_ : 1});
  }

  const Call& call_;
  std::uint32_t ranks_ = 0;    // in all tensors
  std::vector<float> scales_;  // by position; of an average
};

}  // namespace netfold::collective
