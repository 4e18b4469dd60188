// The loops of all vector kernels, over `Lanes`: how one register of elements is loaded, combined and stored.
//
// A Lanes type has: Register, kElementBytes, kCount (elements per register), kBytes (of memory per register), load,
// store and, to be reduced, combine; to be averaged also times and over.
//
// Everything here has internal linkage on purpose: each including file is compiled for another instruction set, and the
// linker must never keep one file's copy of a function for all files.
#pragma once

#include "tables.hpp"

namespace netfold::kernels {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#else
constexpr std::size_t kVectorBytes = 32;
#endif
// A register of elements. The compiler's own vector type: +, *, & and >> work element by element.
template <class T>
struct VectorType {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using VectorOf = typename VectorType<T>::type;
using Floats = VectorOf<float>;
using Doubles = VectorOf<double>;
using Words = VectorOf<std::uint32_t>;

constexpr std::uint32_t kQuietNan32 = 0x7fc00000u;
constexpr std::uint64_t kQuietNan64 = 0x7ff8000000000000u;

// Reduces kRegisters registers over all sources at once: independent chains hide the latency of the addition.
// Everything is loaded before anything is stored, so dst may be a source.
//
// Inlined by force: gcc 12 does not inline the bf16 version with four registers, which costs a third of its speed.
template <class Lanes, std::size_t kRegisters>
[[gnu::always_inline]] inline void reduce_registers(std::byte* dst, const void* const* sources,
                                                    std::size_t source_count, std::size_t offset) {
  typename Lanes::Register total[kRegisters];
  const std::byte* source = static_cast<const std::byte*>(sources[0]) + offset;
  for (std::size_t r = 0; r < kRegisters; ++r) total[r] = Lanes::load(source + r * Lanes::kBytes);
  for (std::size_t s = 1; s < source_count; ++s) {
    source = static_cast<const std::byte*>(sources[s]) + offset;
    for (std::size_t r = 0; r < kRegisters; ++r) {
      total[r] = Lanes::combine(total[r], Lanes::load(source + r * Lanes::kBytes));
    }
  }
  for (std::size_t r = 0; r < kRegisters; ++r) Lanes::store(dst + offset + r * Lanes::kBytes, total[r]);
}

// One entry of the reduce table; serial reduces the elements that do not fill a register.
template <class Lanes, ReduceOp op, DType dtype>
void reduce_lanes(void* dst, const void* const* sources, std::size_t source_count, std::size_t first,
                  std::size_t last) {
  constexpr std::size_t kRegisters = 4;
  auto* const out = static_cast<std::byte*>(dst);
  std::size_t i = first;
  for (; last - i >= kRegisters * Lanes::kCount; i += kRegisters * Lanes::kCount) {
    reduce_registers<Lanes, kRegisters>(out, sources, source_count, i * Lanes::kElementBytes);
  }
  for (; last - i >= Lanes::kCount; i += Lanes::kCount) {
    reduce_registers<Lanes, 1>(out, sources, source_count, i * Lanes::kElementBytes);
  }
  if (i < last) kSerialTable.reduce[index(op)][index(dtype)](dst, sources, source_count, i, last);
}

// The same of partial means.
template <class Lanes, std::size_t kRegisters>
[[gnu::always_inline]] inline void average_registers(std::byte* dst, const void* const* sources,
                                                     std::size_t source_count, std::size_t offset, const Mean& mean) {
  typename Lanes::Register total[kRegisters];
  const std::byte* source = static_cast<const std::byte*>(sources[0]) + offset;
  for (std::size_t r = 0; r < kRegisters; ++r) {
    total[r] = Lanes::times(Lanes::load(source + r * Lanes::kBytes), mean.scales[0]);
  }
  for (std::size_t s = 1; s < source_count; ++s) {
    source = static_cast<const std::byte*>(sources[s]) + offset;
    for (std::size_t r = 0; r < kRegisters; ++r) {
      total[r] = Lanes::combine(total[r], Lanes::times(Lanes::load(source + r * Lanes::kBytes), mean.scales[s]));
    }
  }
  const float divisor = mean_divisor(mean.ranks);
  for (std::size_t r = 0; r < kRegisters; ++r) {
    if (divisor != 1) total[r] = Lanes::over(total[r], divisor);
    Lanes::store(dst + offset + r * Lanes::kBytes, total[r]);
  }
}

// One entry of the average table.
template <class Lanes, DType dtype>
void average_lanes(void* dst, const void* const* sources, std::size_t source_count, std::size_t first, std::size_t last,
                   const Mean& mean) {
  constexpr std::size_t kRegisters = 4;
  auto* const out = static_cast<std::byte*>(dst);
  std::size_t i = first;
  for (; last - i >= kRegisters * Lanes::kCount; i += kRegisters * Lanes::kCount) {
    average_registers<Lanes, kRegisters>(out, sources, source_count, i * Lanes::kElementBytes, mean);
  }
  for (; last - i >= Lanes::kCount; i += Lanes::kCount) {
    average_registers<Lanes, 1>(out, sources, source_count, i * Lanes::kElementBytes, mean);
  }
  if (i < last) kSerialTable.average[index(dtype)](dst, sources, source_count, i, last, mean);
}

// dst[i] = map(src[i]) for whole registers; returns the number of these elements.
template <class To, class From, class Map>
inline std::size_t map_registers(void* dst, const void* src, std::size_t count, Map map) {
  static_assert(To::kCount == From::kCount);
  auto* const out = static_cast<std::byte*>(dst);
  const auto* const in = static_cast<const std::byte*>(src);
  std::size_t i = 0;
  for (; count - i >= To::kCount; i += To::kCount) {
    To::store(out + i * To::kElementBytes, map(From::load(in + i * From::kElementBytes)));
  }
  return i;
}

inline void* at(void* base, std::size_t bytes) { return static_cast<std::byte*>(base) + bytes; }
inline const void* at(const void* base, std::size_t bytes) { return static_cast<const std::byte*>(base) + bytes; }

// One entry of the convert table, between two Lanes with one Register type.
template <class To, DType to, class From, DType from>
void convert_lanes(void* dst, const void* src, std::size_t count) {
  const std::size_t i = map_registers<To, From>(dst, src, count, [](auto value) { return value; });
  kSerialTable.convert[index(to)][index(from)](at(dst, i * To::kElementBytes), at(src, i * From::kElementBytes),
                                               count - i);
}

template <class Lanes, ReduceOp op, DType dtype>
void add_reduction(Table& table) {
  table.reduce[index(op)][index(dtype)] = reduce_lanes<Lanes, op, dtype>;
}

template <class Lanes, DType dtype>
void add_average(Table& table) {
  table.average[index(dtype)] = average_lanes<Lanes, dtype>;
}

template <class To, DType to, class From, DType from>
void add_conversion(Table& table) {
  table.convert[index(to)][index(from)] = convert_lanes<To, to, From, from>;
}

}  // namespace
}  // namespace netfold::kernels
