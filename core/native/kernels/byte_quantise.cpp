// The i8 wire format, block by block. The tables' kernels do the arithmetic in float32. Blocks whose scale or unit
// could leave the normal range (magnitudes below 2^-100 or above 2^100) take the slow path in double.
#include <netfold/kernels/byte_quantise.hpp>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>

#include "tables.hpp"

namespace netfold::kernels {
namespace {

constexpr float kSmallestKernelMagnitude = 0x1p-100f;
constexpr float kLargestKernelMagnitude = 0x1p100f;

// The finaliser of SplitMix64 (Steele, Lea & Flood, 2014).
std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

std::uint32_t block_seed(std::uint64_t key, std::size_t block) {
  return static_cast<std::uint32_t>(mixed(key + block * 0x9e3779b97f4a7c15u) >> 32);
}

bool is_kernel_magnitude(float magnitude) {
  return magnitude >= kSmallestKernelMagnitude && magnitude <= kLargestKernelMagnitude;
}

std::int8_t round_in_double(float value, double scale, int levels, std::uint32_t seed, std::size_t index) {
  const double scaled = value * scale;
  const double below = std::floor(scaled);
  const double up = (scaled - below) * 0x1p24 > rounding_bits(seed, index) ? 1 : 0;
  const double limit = levels;
  const double rounded = below + up;
  return static_cast<std::int8_t>(rounded < limit ? (rounded > -limit ? rounded : -limit) : limit);
}

}  // namespace

std::uint64_t rounding_key(std::uint32_t operation, std::uint32_t worker) {
  return mixed((static_cast<std::uint64_t>(operation) << 32 | worker) + 0x9e3779b97f4a7c15u);
}

// Goes through a block on the stack, front to back: dst may begin where src does, and bytes never overwrite unread
// floats.
void quantise_bytes(std::int8_t* dst, const float* src, float* lost, std::size_t count, const std::int32_t* magnitudes,
                    int levels, std::uint64_t key, std::size_t first_block, const Table& table) {
  assert(levels >= 1);
  std::array<float, kQuantiseBlock> values;
  std::array<float, kQuantiseBlock> kept;
  std::array<std::int8_t, kQuantiseBlock> bytes;
  for (std::size_t begin = 0; begin < count; begin += kQuantiseBlock) {
    const std::size_t length = std::min(kQuantiseBlock, count - begin);
    const std::size_t block = begin / kQuantiseBlock;
    const auto magnitude = std::bit_cast<float>(magnitudes[block]);
    std::memcpy(values.data(), reinterpret_cast<const std::byte*>(src) + begin * sizeof(float), length * sizeof(float));
    if (magnitude == 0) {
      std::fill_n(bytes.begin(), length, std::int8_t{0});
      std::fill_n(kept.begin(), length, 0.0f);
    } else if (const std::uint32_t seed = block_seed(key, first_block + block); is_kernel_magnitude(magnitude)) {
      table.round_to_i8(bytes.data(), values.data(), length, static_cast<float>(levels) / magnitude,
                        static_cast<float>(levels), seed);
      if (lost != nullptr) {
        table.scale_i8_to_f32(kept.data(), bytes.data(), length, magnitude / static_cast<float>(levels));
      }
    } else {
      const double unit = static_cast<double>(magnitude) / levels;
      for (std::size_t i = 0; i < length; ++i) {
        bytes[i] = round_in_double(values[i], 1 / unit, levels, seed, i);
        kept[i] = static_cast<float>(bytes[i] * unit);
      }
    }
    std::memcpy(dst + begin, bytes.data(), length);
    if (lost == nullptr) continue;
    for (std::size_t i = 0; i < length; ++i) values[i] -= kept[i];
    std::memcpy(reinterpret_cast<std::byte*>(lost) + begin * sizeof(float), values.data(), length * sizeof(float));
  }
}

// Goes back to front, for the same reason.
void dequantise_bytes(float* dst, const std::int8_t* src, std::size_t count, const std::int32_t* magnitudes, int levels,
                      const Table& table) {
  assert(levels >= 1);
  std::array<float, kQuantiseBlock> values;
  std::array<std::int8_t, kQuantiseBlock> bytes;
  for (std::size_t block = quantise_block_count(count); block-- > 0;) {
    const std::size_t begin = block * kQuantiseBlock;
    const std::size_t length = std::min(kQuantiseBlock, count - begin);
    const auto magnitude = std::bit_cast<float>(magnitudes[block]);
    std::memcpy(bytes.data(), src + begin, length);
    if (is_kernel_magnitude(magnitude)) {
      table.scale_i8_to_f32(values.data(), bytes.data(), length, magnitude / static_cast<float>(levels));
    } else {
      const double unit = static_cast<double>(magnitude) / levels;
      for (std::size_t i = 0; i < length; ++i) values[i] = static_cast<float>(bytes[i] * unit);
    }
    std::memcpy(reinterpret_cast<std::byte*>(dst) + begin * sizeof(float), values.data(), length * sizeof(float));
  }
}

}  // namespace netfold::kernels
