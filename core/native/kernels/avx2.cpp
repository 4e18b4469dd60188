// AVX2 with F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include "vector_loops.hpp"

namespace netfold::kernels {
namespace {

__m256i raw(Words v) { return reinterpret_cast<__m256i>(v); }
Words words(__m256i v) { return reinterpret_cast<Words>(v); }
const __m128i* halves(const std::byte* p) { return reinterpret_cast<const __m128i*>(p); }
__m128i* halves(std::byte* p) { return reinterpret_cast<__m128i*>(p); }

Floats where_nan(Floats test, Floats then, Floats otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(test, test, _CMP_UNORD_Q));
}
Doubles where_nan(Doubles test, Doubles then, Doubles otherwise) {
  return _mm256_blendv_pd(otherwise, then, _mm256_cmp_pd(test, test, _CMP_UNORD_Q));
}
Floats minimum(Floats a, Floats b) { return _mm256_min_ps(b, a); }
Floats maximum(Floats a, Floats b) { return _mm256_max_ps(b, a); }
Words smaller(Words a, Words b) { return words(_mm256_min_epi32(raw(a), raw(b))); }
Words greater(Words a, Words b) { return words(_mm256_max_epi32(raw(a), raw(b))); }
std::uint32_t greatest_of(Words v) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
  four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}
Words rounded(Floats v) { return words(_mm256_cvtps_epi32(v)); }
Floats to_floats(Words v) { return _mm256_cvtepi32_ps(raw(v)); }
Floats below(Floats v) { return _mm256_floor_ps(v); }
Floats one_where_greater(Floats a, Floats b) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), _mm256_set1_ps(1.0f));
}
Words odd_halves(Words even, Words odd) { return words(_mm256_blend_epi16(raw(even), raw(odd), 0xaa)); }
Floats load_f16(const std::byte* p) { return _mm256_cvtph_ps(_mm_loadu_si128(halves(p))); }
void store_f16(std::byte* p, Floats v) {
  _mm_storeu_si128(halves(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
Words load_u16(const std::byte* p) { return words(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves(p)))); }
void store_u16(std::byte* p, Words v) {
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
  _mm_storeu_si128(halves(p), packed);
}
Words load_i8(const std::byte* p) { return words(_mm256_cvtepi8_epi32(_mm_loadl_epi64(halves(p)))); }
void store_i8(std::byte* p, Words v) {
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
  _mm_storel_epi64(halves(p), _mm_packs_epi16(packed, packed));
}

}  // namespace
}  // namespace netfold::kernels

#include "vector_kernels.hpp"

namespace netfold::kernels {
void add_avx2(Table& table) { add_vector_kernels(table); }
}  // namespace netfold::kernels

#endif
