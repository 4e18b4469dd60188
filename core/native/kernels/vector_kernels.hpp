// The kernels of every vector instruction set, on registers of float, double and uint32_t (Floats, Doubles, Words of
// vector_loops.hpp). The including file first defines these primitives, in the anonymous namespace of netfold::kernels:
//
//   where_nan(test, then, otherwise)   by element: `then` where `test` is NaN; Floats and Doubles
//   minimum(a, b), maximum(a, b)       Floats: a where the two are equal or one is NaN
//   smaller(a, b), greater(a, b)       Words, compared as signed integers
//   greatest_of(v)                     the greatest element of Words, compared as signed integers
//   rounded(v), to_floats(v)           Floats to signed integers in Words, to nearest even; and back
//   below(v)                           Floats: the greatest integer that is not above
//   one_where_greater(a, b)            Floats: 1 where a > b, else 0
//   odd_halves(even, odd)              Words: the lower half of each element from `even`, the upper half from `odd`
//   load_f16, store_f16                Floats in memory as f16, rounded to nearest even
//   load_u16, store_u16                Words in memory as u16; elements below 2^16
//   load_i8, store_i8                  Words in memory as i8; elements from -128 to 127
//
// What must always hold: the bits of serial.cpp. So no fused multiply-add, every NaN canonical before it is stored, and
// bf16 rounded in integers.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace netfold::kernels {
namespace {

Floats canonical(Floats v) { return where_nan(v, std::bit_cast<Floats>(Words{} + kQuietNan32), v); }
Doubles canonical(Doubles v) {
  return where_nan(v, std::bit_cast<Doubles>(VectorOf<std::uint64_t>{} + kQuietNan64), v);
}

template <class T>
struct Plain {
  using Register = VectorOf<T>;
  static constexpr std::size_t kElementBytes = sizeof(T), kCount = kVectorBytes / sizeof(T), kBytes = kVectorBytes;
  static Register load(const std::byte* p) {
    Register v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(std::byte* p, Register v) {
    if constexpr (std::is_floating_point_v<T>) v = canonical(v);
    std::memcpy(p, &v, sizeof v);
  }
  static Register combine(Register a, Register b) { return a + b; }
  static Register times(Register v, float by) { return v * static_cast<T>(by); }
  static Register over(Register v, float by) { return v / static_cast<T>(by); }
};
using F32 = Plain<float>;
using I32 = Plain<std::uint32_t>;

struct F16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = kVectorBytes / 2;
  static Floats load(const std::byte* p) { return load_f16(p); }
  static void store(std::byte* p, Floats v) { store_f16(p, canonical(v)); }
};

struct BF16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = kVectorBytes / 2;
  static Floats load(const std::byte* p) { return std::bit_cast<Floats>(load_u16(p) << 16); }
  // The upper half of each 32-bit element is the result.
  static Words rounded(Floats v) {
    const Words bits = std::bit_cast<Words>(canonical(v));
    return bits + 0x7fffu + (bits >> 16 & 1u);
  }
  static void store(std::byte* p, Floats v) { store_u16(p, rounded(v) >> 16); }
};

// For reductions, where elements need not change places: a register of bf16 is widened to its even and its odd
// elements, by a shift and a mask instead of shuffles.
struct BF16Pairs {
  struct Register {
    Floats even, odd;
  };
  static constexpr std::size_t kElementBytes = 2, kCount = kVectorBytes / 2, kBytes = kVectorBytes;
  static Register load(const std::byte* p) {
    const Words both = I32::load(p);
    return {std::bit_cast<Floats>(both << 16), std::bit_cast<Floats>(both & 0xffff0000u)};
  }
  static void store(std::byte* p, Register v) {
    I32::store(p, odd_halves(BF16::rounded(v.even) >> 16, BF16::rounded(v.odd)));
  }
  static Register combine(Register a, Register b) { return {a.even + b.even, a.odd + b.odd}; }
  static Register times(Register v, float by) { return {v.even * by, v.odd * by}; }
  static Register over(Register v, float by) { return {v.even / by, v.odd / by}; }
};

// A byte of 0 or 1, from any byte.
struct Boolean : Plain<std::uint8_t> {
  static Register load(const std::byte* p) {
    return std::bit_cast<Register>(Plain<std::uint8_t>::load(p) != 0) & std::uint8_t{1};
  }
};
struct BooleanAll : Boolean {
  static Register combine(Register a, Register b) { return a & b; }
};
struct BooleanAny : Boolean {
  static Register combine(Register a, Register b) { return a | b; }
};
struct BooleanOdd : Boolean {
  static Register combine(Register a, Register b) { return a ^ b; }
};

// The bytes of i8, each in 32 bits.
struct I8Wide : I32 {
  static constexpr std::size_t kElementBytes = 1, kBytes = kVectorBytes / 4;
  static Words load(const std::byte* p) { return load_i8(p); }
  static void store(std::byte* p, Words v) { store_i8(p, v); }
};

template <class Base>
struct Min : Base {
  // `minimum` gives a for equal values and where a is NaN, as serial does.
  static Floats combine(Floats a, Floats b) { return where_nan(b, b, minimum(a, b)); }
};
template <class Base>
struct Max : Base {
  static Floats combine(Floats a, Floats b) { return where_nan(b, b, maximum(a, b)); }
};
struct I32Min : I32 {
  static Words combine(Words a, Words b) { return smaller(a, b); }
};
struct I32Max : I32 {
  static Words combine(Words a, Words b) { return greater(a, b); }
};

std::uint32_t largest_magnitude_bits(const void* src, std::size_t count) {
  Words largest{};
  std::size_t i = 0;
  for (; count - i >= I32::kCount; i += I32::kCount) {
    largest = greater(largest, I32::load(static_cast<const std::byte*>(src) + i * 4) & 0x7fffffffu);
  }
  return std::max(greatest_of(largest), kSerialTable.largest_magnitude_bits(at(src, i * 4), count - i));
}

void scale_to_i32(void* dst, const void* src, std::size_t count, float scale) {
  const std::size_t i = map_registers<I32, F32>(dst, src, count, [scale](Floats v) { return rounded(v * scale); });
  kSerialTable.scale_to_i32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

void scale_to_f32(void* dst, const void* src, std::size_t count, float scale) {
  const std::size_t i = map_registers<F32, I32>(dst, src, count, [scale](Words v) { return to_floats(v) * scale; });
  kSerialTable.scale_to_f32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

void round_to_i8(void* dst, const void* src, std::size_t count, float scale, float levels, std::uint32_t seed) {
  const Floats most = Floats{} + levels;
  Words places{};
  for (std::uint32_t i = 0; i < I32::kCount; ++i) places[i] = i;
  Words draws = seed + places * kRoundingStride;
  const std::size_t i = map_registers<I8Wide, F32>(dst, src, count, [&](Floats v) {
    const Floats scaled = v * scale;
    const Floats whole = below(scaled);
    const Floats up = one_where_greater((scaled - whole) * 0x1p24f, to_floats(mixed_bits(draws)));
    draws += kRoundingStride * static_cast<std::uint32_t>(I32::kCount);
    return rounded(maximum(-most, minimum(most, whole + up)));
  });
  kSerialTable.round_to_i8(at(dst, i), at(src, i * 4), count - i, scale, levels,
                           seed + static_cast<std::uint32_t>(i) * kRoundingStride);
}

void scale_i8_to_f32(void* dst, const void* src, std::size_t count, float unit) {
  const std::size_t i = map_registers<F32, I8Wide>(dst, src, count, [unit](Words v) { return to_floats(v) * unit; });
  kSerialTable.scale_i8_to_f32(at(dst, i * 4), at(src, i), count - i, unit);
}

void add_vector_kernels(Table& table) {
  using enum ReduceOp;
  using enum DType;
  add_reduction<F32, sum, f32>(table);
  add_reduction<Plain<double>, sum, f64>(table);
  add_reduction<F16, sum, f16>(table);
  add_reduction<BF16Pairs, sum, bf16>(table);
  add_reduction<Plain<std::uint8_t>, sum, i8>(table);
  add_reduction<Plain<std::uint16_t>, sum, i16>(table);
  add_reduction<I32, sum, i32>(table);
  add_reduction<Plain<std::uint64_t>, sum, i64>(table);
  add_reduction<Plain<std::uint8_t>, sum, u8>(table);
  add_reduction<Plain<std::uint16_t>, sum, u16>(table);
  add_reduction<I32, sum, u32>(table);
  add_reduction<Plain<std::uint64_t>, sum, u64>(table);
  add_reduction<Min<F32>, min, f32>(table);
  add_reduction<Max<F32>, max, f32>(table);
  add_reduction<Min<F16>, min, f16>(table);
  add_reduction<Max<F16>, max, f16>(table);
  add_reduction<Min<BF16>, min, bf16>(table);
  add_reduction<Max<BF16>, max, bf16>(table);
  add_reduction<I32Min, min, i32>(table);
  add_reduction<I32Max, max, i32>(table);

  add_reduction<BooleanAny, sum, boolean>(table);
  add_reduction<BooleanAll, product, boolean>(table);
  add_reduction<BooleanAll, min, boolean>(table);
  add_reduction<BooleanAny, max, boolean>(table);
  add_reduction<BooleanAll, band, boolean>(table);
  add_reduction<BooleanAny, bor, boolean>(table);
  add_reduction<BooleanOdd, bxor, boolean>(table);

  add_average<F32, f32>(table);
  add_average<Plain<double>, f64>(table);
  add_average<F16, f16>(table);
  add_average<BF16Pairs, bf16>(table);

  add_conversion<F16, f16, F32, f32>(table);
  add_conversion<F32, f32, F16, f16>(table);
  add_conversion<BF16, bf16, F32, f32>(table);
  add_conversion<F32, f32, BF16, bf16>(table);

  table.largest_magnitude_bits = largest_magnitude_bits;
  table.scale_to_i32 = scale_to_i32;
  table.scale_to_f32 = scale_to_f32;
  table.round_to_i8 = round_to_i8;
  table.scale_i8_to_f32 = scale_i8_to_f32;
}

}  // namespace
}  // namespace netfold::kernels
