// The header of every frame between two ranks of the point-to-point protocol (point_to_point.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace netfold::collective {

struct FrameHeader {
  enum class Type : std::uint8_t { eager = 1, announce = 2, accept = 3, chunk = 4, credit = 5, abort = 6 };
  static constexpr std::uint32_t kMagic = 0x4e465031;
  std::uint32_t magic = kMagic;
  Type type = Type::eager;
  std::uint8_t dtype = 0;
  std::uint8_t failure = 0;  // of an abort: Failure::Kind
  std::uint8_t orderly = 0;  // of an abort
  std::int32_t tag = 0;      // of an abort: the rank at fault, -1 if unknown
  std::int32_t reserved = 0;
  std::uint64_t id = 0;     // of the message, given by its sender
  std::uint64_t bytes = 0;  // of the message; of a chunk, credit or abort: of the frame itself
};
static_assert(sizeof(FrameHeader) == 32);

}  // namespace netfold::collective
