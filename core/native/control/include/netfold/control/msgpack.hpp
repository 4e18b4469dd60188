// The part of msgpack that control messages use: nil, booleans, integers, floats, text, bytes, arrays and maps with text
// as keys (https://github.com/msgpack/msgpack/blob/master/spec.md). No extension types.
//
// The decoder reads bytes of a peer that may be anybody. It reads no byte beyond the end, makes no element before its
// first byte is there, and bounds the nesting. Text is valid UTF-8.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace netfold::control {

// The peer sent bytes that are not what the protocol says.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Value {
  using Bytes = std::vector<std::byte>;
  using Array = std::vector<Value>;
  using Map = std::vector<std::pair<std::string, Value>>;  // of equal keys the last one counts

  // Integers that are not negative are unsigned.
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, Bytes, Array, Map> data;

  Value() = default;
  Value(bool value) : data(value) {}
  template <std::integral Integer>
    requires(!std::same_as<Integer, bool>)
  Value(Integer value) {
    if (std::cmp_less(value, 0)) {
      data = static_cast<std::int64_t>(value);
    } else {
      data = static_cast<std::uint64_t>(value);
    }
  }
  Value(double value) : data(value) {}
  Value(const char* value) : data(std::string(value)) {}
  Value(std::string value) : data(std::move(value)) {}
  Value(Bytes value) : data(std::move(value)) {}
  Value(Array value) : data(std::move(value)) {}
  Value(Map value) : data(std::move(value)) {}

  // The value of a map's key; null where this is no map, or has no such key.
  const Value* find(std::string_view key) const;
};

// The depth to which arrays and maps may be nested.
inline constexpr int kMaxDepth = 16;

// The shortest form of each value, as other encoders write it.
std::vector<std::byte> encode(const Value& value);
// Throws ProtocolError for anything but one value.
Value decode(std::span<const std::byte> bytes);

}  // namespace netfold::control
