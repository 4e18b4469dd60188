// Canonical bytes of the machines' fields.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

namespace netfold::protocol {

// Appends the bytes of each value to `out`; values are scalars, so no padding comes along.
template <class... Values>
void append_values(std::vector<std::byte>& out, const Values&... values) {
  static_assert((std::is_scalar_v<Values> && ...));
  const auto append = [&out](const auto& value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), first, first + sizeof value);
  };
  (append(values), ...);
}

inline void append_bytes(std::vector<std::byte>& out, const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  out.insert(out.end(), first, first + bytes);
}

}  // namespace netfold::protocol
