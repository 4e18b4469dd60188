// The i32 wire format: float32 as integers that share one exponent per block, so that a sum has the same bits in any
// order of arrival, on any tree and on the host fallback.
//
// Steps of a sum: every worker calls block_magnitudes; the group agrees on the maximum of each block (a plain integer
// max, NaN and Inf included); every worker quantises with the exponents of the agreed magnitudes; any host or switch
// adds the integers; every worker dequantises the total. Rounding happens once at the source and once at the end.
//
// Error. Let e be the agreed exponent of a block (so |x| < 2^e for every finite x in it), h the headroom bits and
// N <= 2^h the contributions. One unit of the integers is u = 2^(e + h - 30). A contribution is off by at most u / 2,
// and integer sums are exact, so
//     |total * u - exact sum| <= N * 2^(e + h - 31),
// and dequantise then rounds total * u to the nearest float32 (to Inf beyond FLT_MAX, as a float sum would be). A lone
// element near the block's maximum keeps all of its 24 bits for h <= 6. A sum of zero is +0. Nothing overflows:
// |x / u| < 2^(30 - h) stays <= 2^(30 - h) after rounding, and 2^h of those sum to at most 2^30.
//
// Non-finite values. In a block with the agreed exponent kExponentNonFinite the integers are counters: they show which
// elements were +Inf, -Inf or NaN at any worker, and dequantise gives the result of a float sum there (Inf - Inf is
// NaN). The block's other elements were not transmitted: they become NaN, never a number that looks right.
//
// Assumes the default floating-point environment: round to nearest, no flush to zero.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace netfold::kernels {

// The kernels of an instruction set (tables.hpp), and those of the one in use.
struct Table;
const Table& active_table();

// Elements that share an exponent; part of the wire format, never to change. Exponents cost 1 / block of the data bytes
// (they are sent as i32): 3 % at 32, 0.8 % at 128. Precision hardly favours smaller blocks: the maximum of 256 gaussian
// values is only 1.3 times that of 32, and the integers have more bits than float32's 24. In a larger block one
// outlier, or the next tensor of a bucket, would cost more neighbours their low bits. 128 floats are 8 AVX-512
// registers, and one packet of 352 exponents covers 128 packets of data.
inline constexpr std::size_t kQuantiseBlock = 128;

// Magnitudes from this value on are Inf or NaN.
inline constexpr std::int32_t kNonFiniteMagnitude = 0x7f800000;

// Reserved exponents; finite blocks have -148 (smallest subnormal) to 128 (FLT_MAX).
inline constexpr std::int16_t kExponentAllZero = INT16_MIN;
inline constexpr std::int16_t kExponentNonFinite = INT16_MAX;

// 2^14 contributions: the two counters of a non-finite block must fit one int32.
inline constexpr int kMaxHeadroomBits = 14;

constexpr std::size_t quantise_block_count(std::size_t count) {
  return count / kQuantiseBlock + (count % kQuantiseBlock != 0);
}

// Returns ceil(log2(contributions)), the headroom bits that the contributions need; contributions >= 1.
constexpr int headroom_bits_for(std::size_t contributions) {
  return static_cast<int>(std::bit_width(contributions - 1));
}

// For all functions below: pointers are borrowed; float32 and int32 data need no alignment; bits are the same for every
// instruction set. Blocks are counted from the operation's start, never from packets.

// magnitudes[b] = the greatest |x| of block b, as a float32's bits: integers in the order of magnitudes, with Inf above
// all numbers and NaN above Inf. src[0] begins a block; the last block may be short. Writes quantise_block_count(count)
// magnitudes.
void block_magnitudes(std::int32_t* magnitudes, const float* src, std::size_t count,
                      const Table& table = active_table());

// exponents[b] = the smallest e with |x| < 2^e for all x up to magnitudes[b], or a reserved value.
void block_exponents(std::int16_t* exponents, const std::int32_t* magnitudes, std::size_t block_count);

// dst[i] = src[i] in units of its block, rounded to nearest even. `dst` may equal `src`.
// exponents: of the group-wide maxima, by block of the whole operation. src[0] is the operation's element number `first_element`,
// so a packet may begin inside a block. Where an exponent is below the block's own, the integers are unspecified (no
// undefined behaviour). An exponent that no float has counts as the nearest exponent of a float.
// Precondition: 0 <= headroom_bits <= kMaxHeadroomBits.
void quantise(std::int32_t* dst, const float* src, std::size_t count, const std::int16_t* exponents, int headroom_bits,
              std::size_t first_element = 0, const Table& table = active_table());

// dst[i] = the float32 nearest to src[i] units of its block: the inverse of quantise, for a sum. `dst` may equal `src`.
// ranks: for an average, the float32 nearest to that divided by so many. No step in between overflows.
void dequantise(float* dst, const std::int32_t* src, std::size_t count, const std::int16_t* exponents,
                int headroom_bits, std::uint32_t ranks = 1, std::size_t first_element = 0,
                const Table& table = active_table());

}  // namespace netfold::kernels
