#include <netfold/kernels/copy.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace netfold::kernels {
namespace {

constexpr std::size_t kLine = 64;

#if defined(__x86_64__)
// Precondition: `to` begins a cache line, and `bytes` are whole lines.
void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // a later release store does not order streaming stores
}
#else
void stream(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace

void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool streams) {
  if (bytes == 0 || to == from) return;
  if (!streams) {
    std::memcpy(to, from, bytes);
    return;
  }
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
  const std::size_t lines = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  stream(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
}

}  // namespace netfold::kernels
