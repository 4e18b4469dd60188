// The i8 wire format: float32 as bytes that share one scale per block, rounded up or down at random, so that the sum of
// the bytes is on average the sum of the inputs.
//
// Steps of a sum: the group agrees on each block's greatest magnitude (block_quantise.hpp, block_magnitudes; a plain
// integer max); every worker rounds its values with it; any host or switch adds the bytes, which cannot overflow; every
// worker scales the total back. N workers have L = floor(127 / N) levels on either side of zero each: 63 for 2, 31 for
// 4, 15 for 8.
//
// Error. Let m be a block's agreed magnitude and u = m / L its unit. x / u lies between two integers; the upper one is
// chosen with the probability of its nearness, to 2^-24. So a contribution is off by less than u and by 0 on average,
// with a variance of at most u^2 / 4; errors of different workers, elements and operations are independent. A sum is
// off by less than N u, and its standard deviation is at most sqrt(N) u / 2. Whole multiples of u, 0 and m among them,
// are not rounded. The scale itself is a float32: all of this holds to 2^-23.
//
// The random numbers are a hash of (operation, worker, element): the same program gives the same bits on every machine.
//
// Non-finite values are not allowed; an operation that meets one is sent as i32 (collective/quantised.cpp).
//
// Assumes the default floating-point environment: round to nearest, no flush to zero.
#pragma once

#include <netfold/kernels/block_quantise.hpp>

namespace netfold::kernels {

// With more, a worker has 1 or 2 levels, and the rounding error exceeds the sum.
inline constexpr int kMaxByteContributions = 32;

// Returns L, for 1 <= contributions <= kMaxByteContributions.
constexpr int byte_levels_for(int contributions) { return 127 / contributions; }

// Returns the hash's key, different for every operation and worker.
std::uint64_t rounding_key(std::uint32_t operation, std::uint32_t worker);

// For both functions: pointers are borrowed; float32 data needs no alignment; bits are the same for every instruction
// set. magnitudes: the group-wide maxima of finite blocks. Where one is below the block's own, the bytes are
// unspecified, within -levels..levels.

// dst[i] = src[i] in units of its block. `dst` may begin where `src` does, or before it.
// first_block: src[0] is the first element of this block of the operation. magnitudes: from that block on.
// lost: null, or lost[i] = src[i] - dst[i] units, the error to add to a later contribution; overlaps neither.
void quantise_bytes(std::int8_t* dst, const float* src, float* lost, std::size_t count, const std::int32_t* magnitudes,
                    int levels, std::uint64_t key, std::size_t first_block = 0, const Table& table = active_table());

// dst[i] = src[i] units of its block. `dst` may begin where `src` does, or behind it. levels: of an average, times the ranks.
void dequantise_bytes(float* dst, const std::int8_t* src, std::size_t count, const std::int32_t* magnitudes, int levels,
                      const Table& table = active_table());

}  // namespace netfold::kernels
