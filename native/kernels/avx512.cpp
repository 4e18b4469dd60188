// The hot kernels for AVX-512 (F, BW, DQ, VL): sums of every dtype, min and max of floats and int32, conversions.
//
// What must always hold: the bits of serial.cpp. So no fused multiply-add, every NaN canonical before it is stored, and
// bf16 rounded in integers (avx512_bf16's own conversion flushes subnormals).
#if defined(__x86_64__)

// gcc < 13 warns of the deliberately undefined registers in its own intrinsics (PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "vector_loops.hpp"

namespace netfold::kernels {
namespace {

struct F32 {
  using Register = __m512;
  static constexpr std::size_t kElementBytes = 4, kCount = 16, kBytes = 64;
  static Register load(const std::byte* p) { return _mm512_loadu_ps(p); }
  static Register canonical(Register v) {
    const Register quiet_nan = _mm512_castsi512_ps(_mm512_set1_epi32(kQuietNan32));
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet_nan);
  }
  static void store(std::byte* p, Register v) { _mm512_storeu_ps(p, canonical(v)); }
  static Register combine(Register a, Register b) { return _mm512_add_ps(a, b); }
};

struct F64 {
  using Register = __m512d;
  static constexpr std::size_t kElementBytes = 8, kCount = 8, kBytes = 64;
  static Register load(const std::byte* p) { return _mm512_loadu_pd(p); }
  static void store(std::byte* p, Register v) {
    const Register quiet_nan = _mm512_castsi512_pd(_mm512_set1_epi64(kQuietNan64));
    _mm512_storeu_pd(p, _mm512_mask_mov_pd(v, _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q), quiet_nan));
  }
  static Register combine(Register a, Register b) { return _mm512_add_pd(a, b); }
};

struct F16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = 32;
  static Register load(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(std::byte* p, Register v) {
    const __m256i halves = _mm512_cvtps_ph(canonical(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  }
};

struct BF16 : F32 {
  static constexpr std::size_t kElementBytes = 2, kBytes = 32;
  static Register load(const std::byte* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  // The upper half of each 32-bit element is the result.
  static __m512i rounded(Register v) {
    const __m512i bits = _mm512_castps_si512(canonical(v));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  }
  static void store(std::byte* p, Register v) {
    const __m512i halves = _mm512_srli_epi32(rounded(v), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(halves));
  }
};

// For reductions, where elements need not change places: a register of bf16 is widened to its even and its odd
// elements, by a shift and a mask instead of shuffles.
struct BF16Pairs {
  struct Register {
    __m512 even, odd;
  };
  static constexpr std::size_t kElementBytes = 2, kCount = 32, kBytes = 64;
  static Register load(const std::byte* p) {
    const __m512i both = _mm512_loadu_si512(p);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, upper))};
  }
  static void store(std::byte* p, Register v) {
    const __m512i even = _mm512_srli_epi32(BF16::rounded(v.even), 16);
    const __m512i odd = BF16::rounded(v.odd);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, even, odd));
  }
  static Register combine(Register a, Register b) { return {F32::combine(a.even, b.even), F32::combine(a.odd, b.odd)}; }
};

template <class Base>
struct Min : Base {
  using Register = typename Base::Register;
  static Register combine(Register a, Register b) {
    // minps(b, a) gives a for equal values and where a is NaN, as serial does; where b is NaN the blend gives b.
    return _mm512_mask_mov_ps(_mm512_min_ps(b, a), _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), b);
  }
};

template <class Base>
struct Max : Base {
  using Register = typename Base::Register;
  static Register combine(Register a, Register b) {
    return _mm512_mask_mov_ps(_mm512_max_ps(b, a), _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), b);
  }
};

struct Integers {
  using Register = __m512i;
  static constexpr std::size_t kBytes = 64;
  static Register load(const std::byte* p) { return _mm512_loadu_si512(p); }
  static void store(std::byte* p, Register v) { _mm512_storeu_si512(p, v); }
};
struct I8 : Integers {
  static constexpr std::size_t kElementBytes = 1, kCount = 64;
  static Register combine(Register a, Register b) { return _mm512_add_epi8(a, b); }
};
struct I16 : Integers {
  static constexpr std::size_t kElementBytes = 2, kCount = 32;
  static Register combine(Register a, Register b) { return _mm512_add_epi16(a, b); }
};
struct I32 : Integers {
  static constexpr std::size_t kElementBytes = 4, kCount = 16;
  static Register combine(Register a, Register b) { return _mm512_add_epi32(a, b); }
};
struct I64 : Integers {
  static constexpr std::size_t kElementBytes = 8, kCount = 8;
  static Register combine(Register a, Register b) { return _mm512_add_epi64(a, b); }
};
struct I32Max : I32 {
  static Register combine(Register a, Register b) { return _mm512_max_epi32(a, b); }
};
struct I32Min : I32 {
  static Register combine(Register a, Register b) { return _mm512_min_epi32(a, b); }
};

std::uint32_t largest_magnitude_bits(const void* src, std::size_t count) {
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; count - i >= I32::kCount; i += I32::kCount) {
    const __m512i bits = I32::load(static_cast<const std::byte*>(src) + i * I32::kElementBytes);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, no_sign));
  }
  const auto in_registers = static_cast<std::uint32_t>(_mm512_reduce_max_epi32(largest));
  const std::uint32_t in_tail = kSerialTable.largest_magnitude_bits(at(src, i * I32::kElementBytes), count - i);
  return in_registers > in_tail ? in_registers : in_tail;
}

void scale_to_i32(void* dst, const void* src, std::size_t count, float scale) {
  const __m512 scales = _mm512_set1_ps(scale);
  const std::size_t i = map_registers<I32, F32>(
      dst, src, count, [scales](__m512 v) { return _mm512_cvtps_epi32(_mm512_mul_ps(v, scales)); });
  kSerialTable.scale_to_i32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

void scale_to_f32(void* dst, const void* src, std::size_t count, float scale) {
  const __m512 scales = _mm512_set1_ps(scale);
  const std::size_t i = map_registers<F32, I32>(
      dst, src, count, [scales](__m512i v) { return _mm512_mul_ps(_mm512_cvtepi32_ps(v), scales); });
  kSerialTable.scale_to_f32(at(dst, i * 4), at(src, i * 4), count - i, scale);
}

// Sixteen bytes, each in 32 bits.
struct I8Wide : I32 {
  static constexpr std::size_t kElementBytes = 1, kBytes = 16;
  static Register load(const std::byte* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(std::byte* p, Register v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  }
};

__m512i rounding_bits(__m512i bits) {
  const __m512i once = _mm512_mullo_epi32(_mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16)),
                                          _mm512_set1_epi32(static_cast<int>(0x7feb352du)));
  const __m512i twice = _mm512_mullo_epi32(_mm512_xor_si512(once, _mm512_srli_epi32(once, 15)),
                                           _mm512_set1_epi32(static_cast<int>(0x846ca68bu)));
  return _mm512_srli_epi32(_mm512_xor_si512(twice, _mm512_srli_epi32(twice, 16)), 8);
}

void round_to_i8(void* dst, const void* src, std::size_t count, float scale, float levels, std::uint32_t seed) {
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512 most = _mm512_set1_ps(levels);
  const __m512 least = _mm512_set1_ps(-levels);
  const __m512i stride = _mm512_set1_epi32(static_cast<int>(kRoundingStride));
  const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i draws = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(seed)), _mm512_mullo_epi32(stride, places));
  const std::size_t i = map_registers<I8Wide, F32>(dst, src, count, [&](__m512 v) {
    const __m512 scaled = _mm512_mul_ps(v, scales);
    const __m512 below = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 fraction = _mm512_mul_ps(_mm512_sub_ps(scaled, below), _mm512_set1_ps(0x1p24f));
    const __mmask16 up = _mm512_cmp_ps_mask(fraction, _mm512_cvtepi32_ps(rounding_bits(draws)), _CMP_GT_OQ);
    draws = _mm512_add_epi32(draws, _mm512_slli_epi32(stride, 4));
    const __m512 rounded = _mm512_mask_add_ps(below, up, below, _mm512_set1_ps(1.0f));
    return _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(rounded, most), least));
  });
  kSerialTable.round_to_i8(at(dst, i), at(src, i * 4), count - i, scale, levels,
                           seed + static_cast<std::uint32_t>(i) * kRoundingStride);
}

void scale_i8_to_f32(void* dst, const void* src, std::size_t count, float unit) {
  const __m512 units = _mm512_set1_ps(unit);
  const std::size_t i = map_registers<F32, I8Wide>(
      dst, src, count, [units](__m512i v) { return _mm512_mul_ps(_mm512_cvtepi32_ps(v), units); });
  kSerialTable.scale_i8_to_f32(at(dst, i * 4), at(src, i), count - i, unit);
}

}  // namespace

void add_avx512(Table& table) {
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
