// The program's own type of a call's elements. Ranks compare it, so that no rank takes another's bits for values of
// another type: a float8_e4m3fn for a float8_e5m2, a complex number for two floats.
#pragma once

#include <netfold/kernels/types.hpp>

#include <cstdint>

namespace netfold::collective {

// The numeric values travel in messages and packets: append only. The first ones are the dtypes of the kernels; the
// others travel as one of those (`carrier`).
enum class Element : std::uint8_t {
  c32 = 16,
  c64 = 17,
  c128 = 18,
  float8_e4m3fn = 19,
  float8_e4m3fnuz = 20,
  float8_e5m2 = 21,
  float8_e5m2fnuz = 22,
  float8_e8m0fnu = 23,
  float4_e2m1fn_x2 = 24,
};
inline constexpr int kFirstCarried = 16;
inline constexpr int kElementCount = 25;
static_assert(kernels::kDTypeCount <= kFirstCarried);

constexpr Element element_of(kernels::DType dtype) { return static_cast<Element>(dtype); }
constexpr bool is_valid_element(std::uint8_t value) {
  return kernels::is_valid_dtype(value) || (value >= kFirstCarried && value < kElementCount);
}
// "f32", "bool", "float8_e4m3fn"; "?" for a value that is no element.
const char* name(Element element);
// The dtype as which elements travel and are reduced.
kernels::DType carrier(Element element);
// The values of the carrier in one element: 2 for a complex number.
int carried_values(Element element);

}  // namespace netfold::collective
