// AVX-512 (F, BW, DQ, VL). Without avx512_bf16, whose conversion flushes subnormals.
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

__m512i raw(Words v) { return reinterpret_cast<__m512i>(v); }
Words words(__m512i v) { return reinterpret_cast<Words>(v); }
const __m256i* halves(const std::byte* p) { return reinterpret_cast<const __m256i*>(p); }
__m256i* halves(std::byte* p) { return reinterpret_cast<__m256i*>(p); }

Floats where_nan(Floats test, Floats then, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(test, test, _CMP_UNORD_Q), then);
}
Doubles where_nan(Doubles test, Doubles then, Doubles otherwise) {
  return _mm512_mask_mov_pd(otherwise, _mm512_cmp_pd_mask(test, test, _CMP_UNORD_Q), then);
}
Floats minimum(Floats a, Floats b) { return _mm512_min_ps(b, a); }
Floats maximum(Floats a, Floats b) { return _mm512_max_ps(b, a); }
Words smaller(Words a, Words b) { return words(_mm512_min_epi32(raw(a), raw(b))); }
Words greater(Words a, Words b) { return words(_mm512_max_epi32(raw(a), raw(b))); }
std::uint32_t greatest_of(Words v) { return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(raw(v))); }
Words rounded(Floats v) { return words(_mm512_cvtps_epi32(v)); }
Floats to_floats(Words v) { return _mm512_cvtepi32_ps(raw(v)); }
Floats below(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
Floats one_where_greater(Floats a, Floats b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
}
Words odd_halves(Words even, Words odd) { return words(_mm512_mask_blend_epi16(0xaaaaaaaau, raw(even), raw(odd))); }
Floats load_f16(const std::byte* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(halves(p))); }
void store_f16(std::byte* p, Floats v) {
  _mm256_storeu_si256(halves(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
Words load_u16(const std::byte* p) { return words(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves(p)))); }
void store_u16(std::byte* p, Words v) { _mm256_storeu_si256(halves(p), _mm512_cvtepi32_epi16(raw(v))); }
Words load_i8(const std::byte* p) {
  return words(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
void store_i8(std::byte* p, Words v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(raw(v))); }

}  // namespace
}  // namespace netfold::kernels

#include "vector_kernels.hpp"

namespace netfold::kernels {
void add_avx512(Table& table) { add_vector_kernels(table); }
}  // namespace netfold::kernels

#endif
