// The i32 wire format, block by block: the meaning of an exponent. The tables' kernels do the arithmetic.
//
// What must always hold: the bits depend on the input, the exponents and the headroom alone. A kernel multiplies by a
// normal power of two, which is exact here: a product that underflows rounds to the integer 0 either way, and a sum
// that had to be rounded to 24 bits is never subnormal once scaled (units are >= 2^-126). Blocks with smaller units
// (all magnitudes below about 2^-96) take the slow path in double, where every product is exact.
#include <netfold/kernels/block_quantise.hpp>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#include "tables.hpp"

namespace netfold::kernels {
namespace {

constexpr std::uint32_t kInfBits = 0x7f800000u;
constexpr int kSmallestExponent = -148;
constexpr int kLargestExponent = 128;
constexpr int kSmallestKernelUnit = -126;

// In a non-finite block an integer holds two counters: of workers with +Inf or NaN, and of workers with -Inf or NaN.
constexpr int kCounterBits = kMaxHeadroomBits + 1;
constexpr std::int32_t kPlusInf = 1;
constexpr std::int32_t kMinusInf = 1 << kCounterBits;
static_assert(2 * kCounterBits < 32, "both counters must fit below the sign bit");

std::int16_t exponent_of(std::uint32_t magnitude_bits) {
  if (magnitude_bits == 0) return kExponentAllZero;
  if (magnitude_bits >= kInfBits) return kExponentNonFinite;
  const int biased = static_cast<int>(magnitude_bits >> 23);
  return static_cast<std::int16_t>(biased != 0 ? biased - 126 : std::bit_width(magnitude_bits) - 149);
}

// Returns log2 of the unit. The clamp makes an exponent that no float has, from a broken peer, harmless.
int unit_exponent(std::int16_t exponent, int headroom_bits) {
  return std::clamp<int>(exponent, kSmallestExponent, kLargestExponent) + headroom_bits - 30;
}

float power_of_two_f32(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23); }
double power_of_two_f64(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

template <class To, class From, class Map>
void map_each(void* dst, const void* src, std::size_t count, Map map) {
  for (std::size_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, static_cast<const std::byte*>(src) + i * sizeof(From), sizeof(From));
    const To to = map(from);
    std::memcpy(static_cast<std::byte*>(dst) + i * sizeof(To), &to, sizeof(To));
  }
}

std::int32_t count_non_finite(float value) {
  if (std::isnan(value)) return kPlusInf + kMinusInf;
  if (std::isinf(value)) return value > 0 ? kPlusInf : kMinusInf;
  return 0;
}

float value_of_counters(std::int32_t counters) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const bool has_plus = (counters & (kMinusInf - 1)) != 0;
  const bool has_minus = (counters >> kCounterBits) != 0;
  if (has_plus == has_minus) return std::numeric_limits<float>::quiet_NaN();
  return has_plus ? kInf : -kInf;
}

// Calls visit(offset, length, exponent) for each run of elements that share a block.
template <class Visit>
void for_each_block(std::size_t count, const std::int16_t* exponents, std::size_t first_element, Visit visit) {
  for (std::size_t offset = 0; offset < count;) {
    const std::size_t element = first_element + offset;
    const std::size_t length = std::min(kQuantiseBlock - element % kQuantiseBlock, count - offset);
    visit(offset, length, exponents[element / kQuantiseBlock]);
    offset += length;
  }
}

}  // namespace

void block_magnitudes(std::int32_t* magnitudes, const float* src, std::size_t count, const Table& table) {
  for (std::size_t begin = 0; begin < count; begin += kQuantiseBlock) {
    const std::size_t length = std::min(kQuantiseBlock, count - begin);
    magnitudes[begin / kQuantiseBlock] = static_cast<std::int32_t>(table.largest_magnitude_bits(src + begin, length));
  }
}

void block_exponents(std::int16_t* exponents, const std::int32_t* magnitudes, std::size_t block_count) {
  std::transform(magnitudes, magnitudes + block_count, exponents,
                 [](std::int32_t bits) { return exponent_of(static_cast<std::uint32_t>(bits)); });
}

void quantise(std::int32_t* dst, const float* src, std::size_t count, const std::int16_t* exponents, int headroom_bits,
              std::size_t first_element, const Table& table) {
  assert(headroom_bits >= 0 && headroom_bits <= kMaxHeadroomBits);
  for_each_block(count, exponents, first_element, [&](std::size_t i, std::size_t length, std::int16_t exponent) {
    if (exponent == kExponentAllZero) {
      map_each<std::int32_t, float>(dst + i, src + i, length, [](float) { return 0; });
    } else if (exponent == kExponentNonFinite) {
      map_each<std::int32_t, float>(dst + i, src + i, length, count_non_finite);
    } else if (const int unit = unit_exponent(exponent, headroom_bits); unit >= kSmallestKernelUnit) {
      table.scale_to_i32(dst + i, src + i, length, power_of_two_f32(-unit));
    } else {
      map_each<std::int32_t, float>(dst + i, src + i, length, [scale = power_of_two_f64(-unit)](float value) {
        return static_cast<std::int32_t>(std::lrint(value * scale));
      });
    }
  });
}

void dequantise(float* dst, const std::int32_t* src, std::size_t count, const std::int16_t* exponents,
                int headroom_bits, std::uint32_t ranks, std::size_t first_element, const Table& table) {
  assert(headroom_bits >= 0 && headroom_bits <= kMaxHeadroomBits);
  // A power of two moves the unit. Otherwise the quotient of a double is near a tie of floats only where it is one.
  const int shift = std::has_single_bit(ranks) ? std::countr_zero(ranks) : 0;
  const double divisor = shift == 0 ? ranks : 1;
  for_each_block(count, exponents, first_element, [&](std::size_t i, std::size_t length, std::int16_t exponent) {
    if (exponent == kExponentAllZero) {
      map_each<float, std::int32_t>(dst + i, src + i, length, [](std::int32_t) { return 0.0f; });
    } else if (exponent == kExponentNonFinite) {
      map_each<float, std::int32_t>(dst + i, src + i, length, value_of_counters);
    } else if (const int unit = unit_exponent(exponent, headroom_bits) - shift;
               unit >= kSmallestKernelUnit && divisor == 1) {
      table.scale_to_f32(dst + i, src + i, length, power_of_two_f32(unit));
    } else {
      const double scale = power_of_two_f64(unit);
      map_each<float, std::int32_t>(dst + i, src + i, length,
                                    [=](std::int32_t value) { return static_cast<float>(value * scale / divisor); });
    }
  });
}

}  // namespace netfold::kernels
