#include <netfold/collective/element.hpp>

namespace netfold::collective {

using kernels::DType;

namespace {

struct Carried {
  const char* name;
  DType carrier;
  int values;
};
constexpr Carried kCarried[kElementCount - kFirstCarried] = {
    {"c32", DType::f16, 2},
    {"c64", DType::f32, 2},
    {"c128", DType::f64, 2},
    {"float8_e4m3fn", DType::u8, 1},
    {"float8_e4m3fnuz", DType::u8, 1},
    {"float8_e5m2", DType::u8, 1},
    {"float8_e5m2fnuz", DType::u8, 1},
    {"float8_e8m0fnu", DType::u8, 1},
    {"float4_e2m1fn_x2", DType::u8, 1},
};

bool is_carried(Element element) { return static_cast<int>(element) >= kFirstCarried; }
const Carried& carried(Element element) { return kCarried[static_cast<int>(element) - kFirstCarried]; }

}  // namespace

const char* name(Element element) {
  if (!is_valid_element(static_cast<std::uint8_t>(element))) return "?";
  return is_carried(element) ? carried(element).name : kernels::name(static_cast<DType>(element));
}

DType carrier(Element element) { return is_carried(element) ? carried(element).carrier : static_cast<DType>(element); }

int carried_values(Element element) { return is_carried(element) ? carried(element).values : 1; }

}  // namespace netfold::collective
