// Element types and reduction operators, which all components share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace netfold::kernels {

// Packets and event records hold the numeric values: append only, never renumber.
enum class DType : std::uint8_t {
  f32 = 0,
  f64 = 1,
  f16 = 2,
  bf16 = 3,
  i8 = 4,
  i16 = 5,
  i32 = 6,
  i64 = 7,
  u8 = 8,
  u16 = 9,
  u32 = 10,
  u64 = 11,
  // A value and its index, 16 bytes, for min_loc and max_loc. Two types are enough: f64 holds every narrower float
  // exactly, and i64 every integer (u64 with its top bit flipped keeps its order).
  f64_i64 = 12,
  i64_i64 = 13,
  // A byte: false is 0, true any other value. Reductions write 0 and 1.
  boolean = 14,
};
inline constexpr int kDTypeCount = 15;

enum class ReduceOp : std::uint8_t {
  sum = 0,
  product = 1,
  min = 2,
  max = 3,
  band = 4,
  bor = 5,
  bxor = 6,
  min_loc = 7,
  max_loc = 8,
};
inline constexpr int kReduceOpCount = 9;

constexpr bool is_valid_dtype(std::uint8_t value) { return value < kDTypeCount; }
constexpr bool is_valid_reduce_op(std::uint8_t value) { return value < kReduceOpCount; }

constexpr std::size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64_i64:
    case DType::i64_i64:
      return 16;
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::f16 || dtype == DType::bf16;
}

const char* name(DType dtype);
const char* name(ReduceOp op);

}  // namespace netfold::kernels
