// The hot kernels for AVX2 with F16C: sums of every dtype, min and max of floats and int32, conversions.
//
// What must always hold: the bits of serial.cpp. So no fused multiply-add, every NaN canonical before it is stored, and
// bf16 rounded in integers.
#if defined(__x86_64__)

#include <immintrin.h>

#include "vector_loops.hpp"

namespace netfold::kernels {
namespace {

struct F32 {
  using Register = __m256;
  static constexpr std::size_t kElementBytes = 4, kCount = 8, kBytes = 32;
  static Register load(const std::byte* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static Register canonical(Register v) {
    const Register quiet_nan = _mm256_castsi256_ps(_mm256_set1_epi32(kQuietNan32));
    return _mm256_blendv_ps(v, quiet_nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  static void store(std::byte* p, Register v) { _mm256_storeu_ps(reinterpret_cast<float*>(p), canonical(v)); }
  static Register combine(Register a, Register b) { return _mm256_add_ps(a, b); }
};

struct F64 {
  using Register = __m256d;
  static constexpr std::size_t kElementBytes = 8, kCount = 4, kBytes = 32;
  static Register load(const std::byte* p) { return _mm256_loadu_pd(reinterpret_cast<const double*>(p)); }
  static void store(std::byte* p, Register v) {
    const Register quiet_nan = _mm256_castsi256_pd(_mm256_set1_epi64x(kQuietNan64));
    const Register is_nan = _mm256_cmp_pd(v, v, _CMP_UNORD_Q);
    _mm256_storeu_pd(reinterpret_cast<double*>(p), _mm256_blendv_pd(v, quiet_nan, is_nan));
  }
  static Register combine(Register a, Register b) { return _mm256_add_pd(a, b); }
};

struct F16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = 16;
  static Register load(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(std::byte* p, Register v) {
    const __m128i halves = _mm256_cvtps_ph(canonical(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  }
};

struct BF16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = 16;
  static Register load(const std::byte* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  // The upper half of each 32-bit element is the result.
  static __m256i rounded(Register v) {
    const __m256i bits = _mm256_castps_si256(canonical(v));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
  static void store(std::byte* p, Register v) {
    const __m256i halves = _mm256_srli_epi32(rounded(v), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }
};

// For reductions, where elements need not change places: a register of bf16 is widened to its even and its odd
// elements, by a shift and a mask instead of shuffles.
struct BF16Pairs {
  struct Register {
    __m256 even, odd;
  };
  static constexpr std::size_t kElementBytes = 2, kCount = 16, kBytes = 32;
  static Register load(const std::byte* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(_mm256_and_si256(both, upper))};
  }
  static void store(std::byte* p, Register v) {
    const __m256i even = _mm256_srli_epi32(BF16::rounded(v.even), 16);
    const __m256i odd = BF16::rounded(v.odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(even, odd, 0xaa));
  }
  static Register combine(Register a, Register b) { return {F32::combine(a.even, b.even), F32::combine(a.odd, b.odd)}; }
};

template <class Base>
struct Min : Base {
  using Register = typename Base::Register;
  static Register combine(Register a, Register b) {
    // minps(b, a) gives a for equal values and where a is NaN, as serial does; where b is NaN the blend gives b.
    return _mm256_blendv_ps(_mm256_min_ps(b, a), b, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
  }
};

template <class Base>
struct Max : Base {
  using Register = typename Base::Register;
  static Register combine(Register a, Register b) {
    return _mm256_blendv_ps(_mm256_max_ps(b, a), b, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
  }
};

struct Integers {
  using Register = __m256i;
  static constexpr std::size_t kBytes = 32;
  static Register load(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(std::byte* p, Register v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
};
struct I8 : Integers {
  static constexpr std::size_t kElementBytes = 1, kCount = 32;
  static Register combine(Register a, Register b) { return _mm256_add_epi8(a, b); }
};
struct I16 : Integers {
  static constexpr std::size_t kElementBytes = 2, kCount = 16;
  static Register combine(Register a, Register b) { return _mm256_add_epi16(a, b); }
};
struct I32 : Integers {
  static constexpr std::size_t kElementBytes = 4, kCount = 8;
  static Register combine(Register a, Register b) { return _mm256_add_epi32(a, b); }
};
struct I64 : Integers {
  static constexpr std::size_t kElementBytes = 8, kCount = 4;
  static Register combine(Register a, Register b) { return _mm256_add_epi64(a, b); }
};
struct I32Max : I32 {
  static Register combine(Register a, Register b) { return _mm256_max_epi32(a, b); }
};
struct I32Min : I32 {
  static Register combine(Register a, Register b) { return _mm256_min_epi32(a, b); }
};

std::uint32_t largest_magnitude_bits(const void* src, std::size_t count) {
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; count - i >= I32::kCount; i += I32::kCount) {
    const __m256i bits = I32::load(static_cast<const std::byte*>(src) + i * I32::kElementBytes);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, no_sign));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 1));
  const auto in_registers = static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
  const std::uint32_t in_tail = kSerialTable.largest_magnitude_bits(at(src, i * I32::kElementBytes), count - i);
  return in_registers > in_tail ? in_registers : in_tail;
}

void scale_to_i32(void* dst, const void* src, std::size_t count, float scale) {
  const __m256 scales = _mm256_set1_ps(scale);
  const std::size_t i = map_registers<I32, F32>(
      dst, src, count, [scales](__m256 v) { return _mm256_cvtps_epi32(_mm256_mul_ps(v, scales)); });
  kSerialTable.scale_to_i32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

void scale_to_f32(void* dst, const void* src, std::size_t count, float scale) {
  const __m256 scales = _mm256_set1_ps(scale);
  const std::size_t i = map_registers<F32, I32>(
      dst, src, count, [scales](__m256i v) { return _mm256_mul_ps(_mm256_cvtepi32_ps(v), scales); });
  kSerialTable.scale_to_f32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

// Eight bytes, each in 32 bits.
struct I8Wide : I32 {
  static constexpr std::size_t kElementBytes = 1, kBytes = 8;
  static Register load(const std::byte* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(std::byte* p, Register v) {
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
  }
};

__m256i rounding_bits(__m256i bits) {
  const __m256i once = _mm256_mullo_epi32(_mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16)),
                                          _mm256_set1_epi32(static_cast<int>(0x7feb352du)));
  const __m256i twice = _mm256_mullo_epi32(_mm256_xor_si256(once, _mm256_srli_epi32(once, 15)),
                                           _mm256_set1_epi32(static_cast<int>(0x846ca68bu)));
  return _mm256_srli_epi32(_mm256_xor_si256(twice, _mm256_srli_epi32(twice, 16)), 8);
}

void round_to_i8(void* dst, const void* src, std::size_t count, float scale, float levels, std::uint32_t seed) {
  const __m256 scales = _mm256_set1_ps(scale);
  const __m256 most = _mm256_set1_ps(levels);
  const __m256 least = _mm256_set1_ps(-levels);
  const __m256i stride = _mm256_set1_epi32(static_cast<int>(kRoundingStride));
  __m256i draws = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(seed)),
                                   _mm256_mullo_epi32(stride, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  const std::size_t i = map_registers<I8Wide, F32>(dst, src, count, [&](__m256 v) {
    const __m256 scaled = _mm256_mul_ps(v, scales);
    const __m256 below = _mm256_floor_ps(scaled);
    const __m256 fraction = _mm256_mul_ps(_mm256_sub_ps(scaled, below), _mm256_set1_ps(0x1p24f));
    const __m256 up = _mm256_cmp_ps(fraction, _mm256_cvtepi32_ps(rounding_bits(draws)), _CMP_GT_OQ);
    draws = _mm256_add_epi32(draws, _mm256_slli_epi32(stride, 3));
    const __m256 rounded = _mm256_add_ps(below, _mm256_and_ps(up, _mm256_set1_ps(1.0f)));
    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(rounded, most), least));
  });
  kSerialTable.round_to_i8(at(dst, i), at(src, i * 4), count - i, scale, levels,
                           seed + static_cast<std::uint32_t>(i) * kRoundingStride);
}

void scale_i8_to_f32(void* dst, const void* src, std::size_t count, float unit) {
  const __m256 units = _mm256_set1_ps(unit);
  const std::size_t i = map_registers<F32, I8Wide>(
      dst, src, count, [units](__m256i v) { return _mm256_mul_ps(_mm256_cvtepi32_ps(v), units); });
  kSerialTable.scale_i8_to_f32(at(dst, i * 4), at(src, i), count - i, unit);
}

}  // namespace

void add_avx2(Table& table) {
  using enum ReduceOp;
  using enum DType;
  add_reduction<F32, sum, f32>(table);
  add_reduction<F64, sum, f64>(table);
  add_reduction<F16, sum, f16>(table);
  add_reduction<BF16Pairs, sum, bf16>(table);
  add_reduction<I8, sum, i8>(table);
  add_reduction<I16, sum, i16>(table);
  add_reduction<I32, sum, i32>(table);
  add_reduction<I64, sum, i64>(table);
  add_reduction<I8, sum, u8>(table);
  add_reduction<I16, sum, u16>(table);
  add_reduction<I32, sum, u32>(table);
  add_reduction<I64, sum, u64>(table);
  add_reduction<Min<F32>, min, f32>(table);
  add_reduction<Max<F32>, max, f32>(table);
  add_reduction<Min<F16>, min, f16>(table);
  add_reduction<Max<F16>, max, f16>(table);
  add_reduction<Min<BF16>, min, bf16>(table);
  add_reduction<Max<BF16>, max, bf16>(table);
  add_reduction<I32Min, min, i32>(table);
  add_reduction<I32Max, max, i32>(table);

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

}  // namespace netfold::kernels

#endif
