// Reduces many sources in one pass: the arithmetic of every collective and of the switch.
#pragma once

#include <netfold/kernels/types.hpp>

#include <bit>
#include <cstdint>

namespace netfold::kernels {

// dst[i] = op(...op(op(sources[0][i], sources[1][i]), sources[2][i])..., sources[n-1][i])
//
// The reduction runs in the order of `sources`, so equal inputs give equal bits on every instruction set.
// Integers wrap. f16 and bf16 accumulate in f32 and are rounded once, to nearest, ties to even.
// Floats keep NaN and Inf. min and max give NaN where any source is NaN (as torch does), and the earlier of -0 and +0.
// Every NaN is written as the one canonical quiet NaN, also with one source: which of two NaNs an addition keeps
// depends on the compiler and the machine. Floats have no band, bor and bxor: returns false.
// Pairs of a value and an index have min_loc and max_loc only: the least (greatest) value, NaN before every number, and
// among equal values (-0 equals +0, NaN equals NaN) the lowest index.
// Booleans have sum, max and bor (any), product, min and band (all), and bxor.
//
// Ownership: all pointers are borrowed for the call and need no alignment. `dst` may equal a source; partial
// overlap is not allowed. source_count >= 1.
//
// Cost: reads source_count * count elements and writes count, each once.
//
// Returns false, and writes nothing, where the operator is not defined for the dtype.
bool reduce(ReduceOp op, DType dtype, void* dst, const void* const* sources, std::size_t source_count,
            std::size_t count);

// Whether `reduce` is defined for this pair: bitwise operators need integers, min_loc and max_loc need pairs.
bool is_defined(ReduceOp op, DType dtype);

// Averages, of numbers only. Floats are averaged by partial means: the partial mean of m ranks is the sum of their
// values divided by 2^ceil(log2 m). It is never larger than the largest value, so it overflows in no type. A power of
// two changes no digit, except those that a subnormal number has no place for. What remains to divide by at the end is
// more than 1/2 and at most 1.
// Integers are added, wrap, and are divided by the ranks at the end, toward zero.

// The factor that makes the partial mean of `ranks` a term of the partial mean of `all` of them; ranks <= all.
constexpr float mean_scale(std::uint32_t ranks, std::uint32_t all) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(127 + std::bit_width(ranks - 1) - std::bit_width(all - 1))
                              << 23);
}

struct Mean {
  const float* scales = nullptr;  // by source: floats are multiplied by it first
  std::uint32_t ranks = 1;        // 1: the result is a partial mean; else the average of so many ranks
};

// As reduce() by sum, of partial means. The result is rounded once, behind the division. `dst` may equal a source.
// Returns false, and writes nothing, for booleans and pairs.
bool average(DType dtype, void* dst, const void* const* sources, std::size_t source_count, std::size_t count,
             const Mean& mean);
bool can_average(DType dtype);

}  // namespace netfold::kernels
