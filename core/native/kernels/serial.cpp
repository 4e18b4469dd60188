// Every kernel in plain C++: the oracle that vector kernels equal bit for bit, and their fallback.
//
// What must always hold:
//  - A reduction runs in the order of the sources. f16 and bf16 accumulate in f32 and are rounded once.
//  - Integers wrap: arithmetic is unsigned and at least 32 bits wide (u16 * u16 would overflow int).
//  - A NaN is written as the one canonical quiet NaN. Which of two NaNs an addition keeps depends on the machine and on
//    the order of operands, which compilers may swap. With canonical NaNs the bits are the same everywhere.
//  - No pointer is assumed to be aligned: elements are loaded and stored by memcpy.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "tables.hpp"

namespace netfold::kernels {
namespace {

template <class T>
T load_bits(const void* base, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store_bits(void* base, std::size_t i, T value) {
  std::memcpy(static_cast<std::byte*>(base) + i * sizeof(T), &value, sizeof(T));
}

template <class T>
T canonical(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return value == value ? value : std::numeric_limits<T>::quiet_NaN();
  } else {
    return value;
  }
}

float f32_from_f16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;  // f32's field positions, f16's exponent bias
  if (magnitude >= 0x0f800000u) return std::bit_cast<float>(sign | 0x7f800000u | magnitude);
  if (magnitude < 0x00800000u) {  // subnormal: a count of 2^-24
    const float value = static_cast<float>(half & 0x3ffu) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | (magnitude + ((127u - 15u) << 23)));
}

std::uint16_t f16_from_f32(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and up round to Inf
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is a multiple of 2^-24, the spacing of floats in [0.5, 1): the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((magnitude - ((127u - 15u) << 23)) >> 13));
}

float f32_from_bf16(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

std::uint16_t bf16_from_f32(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(canonical(value));
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>(bits >> 16);
}

// How elements of a dtype are loaded and stored, and the type in which they are reduced.
template <class T>
struct Plain {
  using Value = T;
  static Value load(const void* base, std::size_t i) { return load_bits<T>(base, i); }
  static void store(void* base, std::size_t i, Value value) { store_bits(base, i, canonical(value)); }
};
template <float (*widen)(std::uint16_t), std::uint16_t (*narrow)(float)>
struct Half {
  using Value = float;
  static Value load(const void* base, std::size_t i) { return widen(load_bits<std::uint16_t>(base, i)); }
  static void store(void* base, std::size_t i, Value value) { store_bits(base, i, narrow(value)); }
};
using F16 = Half<f32_from_f16, f16_from_f32>;
using BF16 = Half<f32_from_bf16, bf16_from_f32>;

// 0 and 1, from any byte.
struct Boolean {
  using Value = std::uint8_t;
  static Value load(const void* base, std::size_t i) { return load_bits<std::uint8_t>(base, i) != 0 ? 1 : 0; }
  static void store(void* base, std::size_t i, Value value) { store_bits(base, i, value); }
};

// uint32_t or uint64_t: unsigned, and not promoted to int.
template <class T>
using Wrapping = decltype(std::make_unsigned_t<T>{} + 0u);

template <class Operator>
struct Arithmetic {
  template <class T>
  static T combine(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return Operator{}(a, b);
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(Operator{}(static_cast<Wrapping<T>>(a), static_cast<Wrapping<T>>(b)));
  }
};
// Of -0 and +0, and of two NaNs, the earlier one is kept.
template <class Better>
struct Extreme {
  template <class T>
  static T combine(T a, T b) {
    return Better{}(b, a) || b != b ? b : a;
  }
};

// A value and its index. A NaN comes before every number, as in NumPy's argmin and argmax. Of equal values (all NaNs
// are equal, and -0 equals +0) the lower index is kept, so the order of the reduction does not matter.
template <class T>
struct Located {
  struct Value {
    T value;
    std::int64_t index;
  };
  static_assert(sizeof(Value) == 16);
  static Value load(const void* base, std::size_t i) { return load_bits<Value>(base, i); }
  static void store(void* base, std::size_t i, Value pair) {
    store_bits(base, i, Value{canonical(pair.value), pair.index});
  }
};
template <class Better>
struct Locate {
  template <class Pair>
  static Pair combine(Pair a, Pair b) {
    const bool a_nan = a.value != a.value;
    const bool b_nan = b.value != b.value;
    if (a_nan != b_nan) return b_nan ? b : a;
    if (a_nan || a.value == b.value) return b.index < a.index ? b : a;
    return Better{}(b.value, a.value) ? b : a;
  }
};

// Works tile by tile, so that the compiler may vectorise over elements while each element's reduction keeps its order.
template <class Element, class Op>
void reduce_each(void* dst, const void* const* sources, std::size_t source_count, std::size_t first, std::size_t last) {
  constexpr std::size_t kTile = 64;
  typename Element::Value total[kTile];
  for (std::size_t begin = first; begin < last; begin += kTile) {
    const std::size_t n = std::min(kTile, last - begin);
    for (std::size_t j = 0; j < n; ++j) total[j] = Element::load(sources[0], begin + j);
    for (std::size_t s = 1; s < source_count; ++s) {
      const void* const source = sources[s];
      for (std::size_t j = 0; j < n; ++j) total[j] = Op::combine(total[j], Element::load(source, begin + j));
    }
    for (std::size_t j = 0; j < n; ++j) Element::store(dst, begin + j, total[j]);
  }
}

// Divides by the ranks: floats, partial means by now, by what is left of them.
template <class T>
T divided(T total, std::uint32_t ranks) {
  if constexpr (std::is_floating_point_v<T>) return total / static_cast<T>(mean_divisor(ranks));
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    return static_cast<T>(static_cast<Wide>(total) / static_cast<Wide>(ranks));
  }
}

template <class Element>
void average_each(void* dst, const void* const* sources, std::size_t source_count, std::size_t first, std::size_t last,
                  const Mean& mean) {
  using Value = typename Element::Value;
  constexpr std::size_t kTile = 64;
  const auto scaled = [](Value value, float scale) {
    if constexpr (std::is_floating_point_v<Value>) return value * static_cast<Value>(scale);
    if constexpr (std::is_integral_v<Value>) return value;
  };
  Value total[kTile];
  for (std::size_t begin = first; begin < last; begin += kTile) {
    const std::size_t n = std::min(kTile, last - begin);
    for (std::size_t j = 0; j < n; ++j) total[j] = scaled(Element::load(sources[0], begin + j), mean.scales[0]);
    for (std::size_t s = 1; s < source_count; ++s) {
      for (std::size_t j = 0; j < n; ++j) {
        const Value term = scaled(Element::load(sources[s], begin + j), mean.scales[s]);
        total[j] = Arithmetic<std::plus<>>::combine(total[j], term);
      }
    }
    for (std::size_t j = 0; j < n; ++j) Element::store(dst, begin + j, divided(total[j], mean.ranks));
  }
}

template <class To, class From>
void convert_each(void* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) To::store(dst, i, static_cast<typename To::Value>(From::load(src, i)));
}

template <std::size_t kElementBytes>
void copy(void* dst, const void* src, std::size_t count) {
  if (count != 0) std::memmove(dst, src, count * kElementBytes);
}

std::uint32_t largest_magnitude_bits(const void* src, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, load_bits<std::uint32_t>(src, i) & 0x7fffffffu);
  }
  return largest;
}

void scale_to_i32(void* dst, const void* src, std::size_t count, float scale) {
  for (std::size_t i = 0; i < count; ++i) {
    store_bits(dst, i, static_cast<std::int32_t>(std::lrint(load_bits<float>(src, i) * scale)));
  }
}

void scale_to_f32(void* dst, const void* src, std::size_t count, float scale) {
  for (std::size_t i = 0; i < count; ++i) {
    store_bits(dst, i, static_cast<float>(load_bits<std::int32_t>(src, i)) * scale);
  }
}

void round_to_i8(void* dst, const void* src, std::size_t count, float scale, float levels, std::uint32_t seed) {
  for (std::size_t i = 0; i < count; ++i) {
    const float scaled = load_bits<float>(src, i) * scale;
    const float below = std::floor(scaled);
    const bool up = (scaled - below) * 0x1p24f > static_cast<float>(rounding_bits(seed, i));
    const float rounded = below + (up ? 1.0f : 0.0f);
    const float bounded = rounded < levels ? rounded : levels;
    store_bits(dst, i, static_cast<std::int8_t>(bounded > -levels ? bounded : -levels));
  }
}

void scale_i8_to_f32(void* dst, const void* src, std::size_t count, float unit) {
  for (std::size_t i = 0; i < count; ++i) {
    store_bits(dst, i, static_cast<float>(load_bits<std::int8_t>(src, i)) * unit);
  }
}

template <class Element>
constexpr void add_dtype(Table& table, DType dtype) {
  table.reduce[index(ReduceOp::sum)][index(dtype)] = reduce_each<Element, Arithmetic<std::plus<>>>;
  table.average[index(dtype)] = average_each<Element>;
  table.reduce[index(ReduceOp::product)][index(dtype)] = reduce_each<Element, Arithmetic<std::multiplies<>>>;
  table.reduce[index(ReduceOp::min)][index(dtype)] = reduce_each<Element, Extreme<std::less<>>>;
  table.reduce[index(ReduceOp::max)][index(dtype)] = reduce_each<Element, Extreme<std::greater<>>>;
  if constexpr (std::is_integral_v<typename Element::Value>) {
    table.reduce[index(ReduceOp::band)][index(dtype)] = reduce_each<Element, Arithmetic<std::bit_and<>>>;
    table.reduce[index(ReduceOp::bor)][index(dtype)] = reduce_each<Element, Arithmetic<std::bit_or<>>>;
    table.reduce[index(ReduceOp::bxor)][index(dtype)] = reduce_each<Element, Arithmetic<std::bit_xor<>>>;
  }
}

constexpr void add_boolean(Table& table) {
  const auto set = [&](ReduceOp op, Table::Reduce* kernel) { table.reduce[index(op)][index(DType::boolean)] = kernel; };
  for (const ReduceOp all : {ReduceOp::product, ReduceOp::min, ReduceOp::band}) {
    set(all, reduce_each<Boolean, Arithmetic<std::bit_and<>>>);
  }
  for (const ReduceOp any : {ReduceOp::sum, ReduceOp::max, ReduceOp::bor}) {
    set(any, reduce_each<Boolean, Arithmetic<std::bit_or<>>>);
  }
  set(ReduceOp::bxor, reduce_each<Boolean, Arithmetic<std::bit_xor<>>>);
}

template <class T>
constexpr void add_located(Table& table, DType dtype) {
  table.reduce[index(ReduceOp::min_loc)][index(dtype)] = reduce_each<Located<T>, Locate<std::less<>>>;
  table.reduce[index(ReduceOp::max_loc)][index(dtype)] = reduce_each<Located<T>, Locate<std::greater<>>>;
}

constexpr Table build_table() {
  Table table{};
  add_dtype<Plain<float>>(table, DType::f32);
  add_dtype<Plain<double>>(table, DType::f64);
  add_dtype<F16>(table, DType::f16);
  add_dtype<BF16>(table, DType::bf16);
  add_dtype<Plain<std::int8_t>>(table, DType::i8);
  add_dtype<Plain<std::int16_t>>(table, DType::i16);
  add_dtype<Plain<std::int32_t>>(table, DType::i32);
  add_dtype<Plain<std::int64_t>>(table, DType::i64);
  add_dtype<Plain<std::uint8_t>>(table, DType::u8);
  add_dtype<Plain<std::uint16_t>>(table, DType::u16);
  add_dtype<Plain<std::uint32_t>>(table, DType::u32);
  add_dtype<Plain<std::uint64_t>>(table, DType::u64);
  add_boolean(table);
  add_located<double>(table, DType::f64_i64);
  add_located<std::int64_t>(table, DType::i64_i64);

  constexpr Table::Convert* kCopies[] = {copy<1>, copy<2>, copy<4>, copy<8>, copy<16>};
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    table.convert[i][i] = kCopies[std::countr_zero(element_bytes(static_cast<DType>(i)))];
  }
  table.convert[index(DType::f16)][index(DType::f32)] = convert_each<F16, Plain<float>>;
  table.convert[index(DType::f32)][index(DType::f16)] = convert_each<Plain<float>, F16>;
  table.convert[index(DType::bf16)][index(DType::f32)] = convert_each<BF16, Plain<float>>;
  table.convert[index(DType::f32)][index(DType::bf16)] = convert_each<Plain<float>, BF16>;
  table.convert[index(DType::f32)][index(DType::f64)] = convert_each<Plain<float>, Plain<double>>;
  table.convert[index(DType::f64)][index(DType::f32)] = convert_each<Plain<double>, Plain<float>>;

  table.largest_magnitude_bits = largest_magnitude_bits;
  table.scale_to_i32 = scale_to_i32;
  table.scale_to_f32 = scale_to_f32;
  table.round_to_i8 = round_to_i8;
  table.scale_i8_to_f32 = scale_i8_to_f32;
  return table;
}

}  // namespace

constinit const Table kSerialTable = build_table();

}  // namespace netfold::kernels
