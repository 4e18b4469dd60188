// One table of kernels per instruction set; private to this component.
//
// `serial` fills every entry that has a meaning. `avx2` begins as a copy of `serial`, `avx512` as a copy of `avx2`, and
// each replaces the entries that it does better. So an operation without a vector version falls back to serial, a new
// instruction set is one new file, and a call costs one look-up.
//
// What must always hold: an entry gives the serial entry's bits.
#pragma once

#include <netfold/kernels/isa.hpp>
#include <netfold/kernels/reduce.hpp>
#include <netfold/kernels/types.hpp>

namespace netfold::kernels {

struct Table {
  // Reduces elements [first, last): a vector kernel leaves its last elements to serial without moving pointers.
  using Reduce = void(void* dst, const void* const* sources, std::size_t source_count, std::size_t first,
                      std::size_t last);
  using Average = void(void* dst, const void* const* sources, std::size_t source_count, std::size_t first,
                       std::size_t last, const Mean& mean);
  using Convert = void(void* dst, const void* src, std::size_t count);

  Reduce* reduce[kReduceOpCount][kDTypeCount];  // null: the operator has no meaning for the dtype
  Average* average[kDTypeCount];                // null: the dtype has no average
  Convert* convert[kDTypeCount][kDTypeCount];   // [to][from]; null: no such conversion

  // For block_quantise: float32 magnitudes compare as integers without the sign bit, Inf above all numbers and NaN
  // above Inf.
  std::uint32_t (*largest_magnitude_bits)(const void* src, std::size_t count);
  // i32 = round(f32 * scale), f32 = i32 * scale; scale is a normal power of two, and the results of the first fit.
  void (*scale_to_i32)(void* dst, const void* src, std::size_t count, float scale);
  void (*scale_to_f32)(void* dst, const void* src, std::size_t count, float scale);
  // For byte_quantise: i8 = f32 * scale, where element i rounds up if its fraction is above rounding_bits(seed, i) /
  // 2^24, clamped to +-levels; f32 = i8 * unit.
  void (*round_to_i8)(void* dst, const void* src, std::size_t count, float scale, float levels, std::uint32_t seed);
  void (*scale_i8_to_f32)(void* dst, const void* src, std::size_t count, float unit);
};

// Element i of a block draws from seed + i * kRoundingStride.
inline constexpr std::uint32_t kRoundingStride = 0x9e3779b9u;

// Returns 24 evenly distributed bits ("lowbias32", Wellons 2018). Bits: uint32_t, or a vector of them.
template <class Bits>
constexpr Bits mixed_bits(Bits bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return (bits ^ (bits >> 16)) >> 8;
}
constexpr std::uint32_t rounding_bits(std::uint32_t seed, std::size_t index) {
  return mixed_bits(seed + static_cast<std::uint32_t>(index) * kRoundingStride);
}

// The divisor that makes a partial mean of `ranks` their mean.
constexpr float mean_divisor(std::uint32_t ranks) { return static_cast<float>(ranks) * mean_scale(1, ranks); }

constexpr std::size_t index(ReduceOp op) { return static_cast<std::size_t>(op); }
constexpr std::size_t index(DType dtype) { return static_cast<std::size_t>(dtype); }

extern const Table kSerialTable;
// Each is compiled for its instruction set as a whole: call only where the CPU has that set.
void add_avx2(Table& table);
void add_avx512(Table& table);

// Returns null where this CPU or build lacks the instruction set.
const Table* find_table(Isa isa);
const Table& active_table();

}  // namespace netfold::kernels
