// The names of dtypes, operators and instruction sets, as users read and write them. Packets hold their numbers.
#include <netfold/kernels/isa.hpp>
#include <netfold/kernels/types.hpp>

namespace netfold::kernels {

const char* name(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"f32", "f64", "f16", "bf16", "i8",  "i16",     "i32",
                                               "i64", "u8",  "u16", "u32",  "u64", "f64_i64", "i64_i64"};
  const auto value = static_cast<std::uint8_t>(dtype);
  return is_valid_dtype(value) ? kNames[value] : "unknown dtype";
}

const char* name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum", "product", "min",     "max",    "band",
                                                  "bor", "bxor",    "min_loc", "max_loc"};
  const auto value = static_cast<std::uint8_t>(op);
  return is_valid_reduce_op(value) ? kNames[value] : "unknown operator";
}

const char* name(Isa isa) {
  switch (isa) {
    case Isa::serial:
      return "serial";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "unknown instruction set";
}

}  // namespace netfold::kernels
