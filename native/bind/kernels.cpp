// netfold._native.kernels: the kernels on NumPy arrays, for tests and diagnostics.
//
// An array is C-contiguous memory whose element size is the named dtype's; its own dtype does not matter
// (bf16 comes as uint16) and it needs no alignment. `isa` names the instruction set to run, by default the
// process's active one. Misuse raises ValueError before anything is touched. Not a hot path: collectives call
// the kernels from C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <netfold/kernels/byte_quantise.hpp>
#include <netfold/kernels/copy.hpp>
#include <netfold/kernels/isa.hpp>

#include <optional>
#include <string>
#include <vector>

// The component's inside, for this file alone: comparing instruction sets needs a table other than the active one.
#include "../kernels/tables.hpp"

namespace nb = nanobind;

namespace {

using namespace netfold::kernels;

using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using IsaName = std::optional<std::string>;

[[noreturn]] void refuse(const std::string& sentence) { throw nb::value_error(sentence.c_str()); }

template <class Enum>
Enum parse(const char* kind, const std::string& word, int value_count) {
  std::string known;
  for (int i = 0; i < value_count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (word == name(value)) return value;
    known += std::string(i == 0 ? "" : ", ") + name(value);
  }
  refuse(std::string(kind) + " '" + word + "' is unknown; expected one of " + known);
}

DType parse_dtype(const std::string& word) { return parse<DType>("dtype", word, kDTypeCount); }

const Table& table_of(const IsaName& isa) {
  if (!isa) return active_table();
  const Table* table = find_table(parse<Isa>("instruction set", *isa, 3));
  if (table == nullptr) refuse("instruction set '" + *isa + "' is not available on this CPU");
  return *table;
}

template <class Array>
std::size_t count_of(const Array& array, DType dtype, const std::string& role) {
  if (array.itemsize() != element_bytes(dtype)) {
    refuse(role + " has elements of " + std::to_string(array.itemsize()) + " bytes, expected " +
           std::to_string(element_bytes(dtype)) + " for " + name(dtype));
  }
  return array.size();
}

void expect_count(std::size_t count, std::size_t expected, const std::string& role) {
  if (count != expected) {
    refuse(role + " has " + std::to_string(count) + " elements, expected " + std::to_string(expected));
  }
}

void reduce_arrays(const std::string& op_name, const std::string& dtype_name, Output dst,
                   const std::vector<Input>& sources, const IsaName& isa) {
  const auto op = parse<ReduceOp>("operator", op_name, kReduceOpCount);
  const DType dtype = parse_dtype(dtype_name);
  Table::Reduce* const kernel = table_of(isa).reduce[index(op)][index(dtype)];
  if (kernel == nullptr) refuse("operator '" + op_name + "' has no meaning for " + dtype_name);
  if (sources.empty()) refuse("reduce needs at least one source");

  const std::size_t count = count_of(dst, dtype, "dst");
  std::vector<const void*> pointers;
  for (const Input& source : sources) {
    const std::string role = "source " + std::to_string(pointers.size());
    expect_count(count_of(source, dtype, role), count, role);
    pointers.push_back(source.data());
  }
  kernel(dst.data(), pointers.data(), pointers.size(), 0, count);
}

void convert_array(const std::string& to_name, Output dst, const std::string& from_name, Input src,
                   const IsaName& isa) {
  const DType to = parse_dtype(to_name);
  const DType from = parse_dtype(from_name);
  Table::Convert* const kernel = table_of(isa).convert[index(to)][index(from)];
  if (kernel == nullptr) refuse("there is no conversion from " + from_name + " to " + to_name);
  const std::size_t count = count_of(dst, to, "dst");
  expect_count(count_of(src, from, "src"), count, "src");
  kernel(dst.data(), src.data(), count);
}

void copy_array(Output dst, Input src, bool streams) {
  const std::size_t count = count_of(dst, DType::u8, "dst");
  expect_count(count_of(src, DType::u8, "src"), count, "src");
  copy(static_cast<std::byte*>(dst.data()), static_cast<const std::byte*>(src.data()), count, streams);
}

void block_exponents_of_array(Output exponents, Input src, const IsaName& isa) {
  const std::size_t count = count_of(src, DType::f32, "src");
  expect_count(count_of(exponents, DType::i16, "exponents"), quantise_block_count(count), "exponents");
  std::vector<std::int32_t> magnitudes(quantise_block_count(count));
  block_magnitudes(table_of(isa), magnitudes.data(), static_cast<const float*>(src.data()), count);
  block_exponents(static_cast<std::int16_t*>(exponents.data()), magnitudes.data(), magnitudes.size());
}

void block_magnitudes_of_array(Output magnitudes, Input src, const IsaName& isa) {
  const std::size_t count = count_of(src, DType::f32, "src");
  expect_count(count_of(magnitudes, DType::i32, "magnitudes"), quantise_block_count(count), "magnitudes");
  block_magnitudes(table_of(isa), static_cast<std::int32_t*>(magnitudes.data()), static_cast<const float*>(src.data()),
                   count);
}

// The element count, once everything fits.
std::size_t check_bytes(const Output& dst, DType to, const Input& src, DType from, const Input& magnitudes,
                        int contributions) {
  if (contributions < 1 || contributions > kMaxByteContributions) {
    refuse("contributions is " + std::to_string(contributions) + ", expected 1 to " +
           std::to_string(kMaxByteContributions));
  }
  const std::size_t count = count_of(dst, to, "dst");
  expect_count(count_of(src, from, "src"), count, "src");
  expect_count(count_of(magnitudes, DType::i32, "magnitudes"), quantise_block_count(count), "magnitudes");
  return count;
}

void quantise_bytes_of_array(Output dst, Input src, Input magnitudes, int contributions, std::uint32_t operation,
                             std::uint32_t worker, std::optional<Output> lost, const IsaName& isa) {
  const std::size_t count = check_bytes(dst, DType::i8, src, DType::f32, magnitudes, contributions);
  if (lost) expect_count(count_of(*lost, DType::f32, "lost"), count, "lost");
  quantise_bytes(table_of(isa), static_cast<std::int8_t*>(dst.data()), static_cast<const float*>(src.data()),
                 lost ? static_cast<float*>(lost->data()) : nullptr, count,
                 static_cast<const std::int32_t*>(magnitudes.data()), byte_levels_for(contributions),
                 rounding_key(operation, worker));
}

void dequantise_bytes_of_array(Output dst, Input src, Input magnitudes, int contributions, const IsaName& isa) {
  const std::size_t count = check_bytes(dst, DType::f32, src, DType::i8, magnitudes, contributions);
  dequantise_bytes(table_of(isa), static_cast<float*>(dst.data()), static_cast<const std::int8_t*>(src.data()), count,
                   static_cast<const std::int32_t*>(magnitudes.data()), byte_levels_for(contributions));
}

// What quantise and dequantise alike need: the element count, once everything fits.
std::size_t check_quantised(const Output& dst, DType to, const Input& src, DType from, const Input& exponents,
                            int headroom_bits, std::size_t first_element) {
  if (headroom_bits < 0 || headroom_bits > kMaxHeadroomBits) {
    refuse("headroom_bits is " + std::to_string(headroom_bits) + ", expected 0 to " + std::to_string(kMaxHeadroomBits));
  }
  const std::size_t count = count_of(dst, to, "dst");
  expect_count(count_of(src, from, "src"), count, "src");
  const std::size_t covered = count_of(exponents, DType::i16, "exponents") * kQuantiseBlock;
  if (first_element > covered || count > covered - first_element) {
    refuse("exponents cover " + std::to_string(covered) + " elements of the operation, expected at least " +
           std::to_string(count) + " from element " + std::to_string(first_element) + " on");
  }
  return count;
}

void quantise_array(Output dst, Input src, Input exponents, int headroom_bits, std::size_t first_element,
                    const IsaName& isa) {
  const std::size_t count = check_quantised(dst, DType::i32, src, DType::f32, exponents, headroom_bits, first_element);
  quantise(table_of(isa), static_cast<std::int32_t*>(dst.data()), static_cast<const float*>(src.data()), count,
           static_cast<const std::int16_t*>(exponents.data()), headroom_bits, first_element);
}

void dequantise_array(Output dst, Input src, Input exponents, int headroom_bits, std::size_t first_element,
                      const IsaName& isa) {
  const std::size_t count = check_quantised(dst, DType::f32, src, DType::i32, exponents, headroom_bits, first_element);
  dequantise(table_of(isa), static_cast<float*>(dst.data()), static_cast<const std::int32_t*>(src.data()), count,
             static_cast<const std::int16_t*>(exponents.data()), headroom_bits, first_element);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa isa : {Isa::serial, Isa::avx2, Isa::avx512}) {
    if (find_table(isa) != nullptr) names.emplace_back(name(isa));
  }
  return names;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::module_ kernels = m.def_submodule("kernels", "Reduce, convert and quantise NumPy arrays; for tests.");
  const auto isa = [] { return nb::arg("isa") = nb::none(); };
  kernels.def("reduce", reduce_arrays, nb::arg("op"), nb::arg("dtype"), nb::arg("dst"), nb::arg("sources"), isa(),
              "dst[i] = op over all sources[k][i], folded in the order of `sources`; dst may be a source.");
  kernels.def("convert", convert_array, nb::arg("to"), nb::arg("dst"), nb::arg("from_"), nb::arg("src"), isa(),
              "dst = src as dtype `to`; narrowing rounds to nearest even.");
  kernels.def("copy", copy_array, nb::arg("dst"), nb::arg("src"), nb::arg("streams"),
              "dst = src, of u8 alike; `streams`: past the caches.");
  kernels.def("block_exponents", block_exponents_of_array, nb::arg("exponents"), nb::arg("src"), isa(),
              "The i32 wire format's exponent for each block of `block_elements` float32.");
  kernels.def("block_magnitudes", block_magnitudes_of_array, nb::arg("magnitudes"), nb::arg("src"), isa(),
              "The bits of the greatest magnitude in each block of `block_elements` float32, as int32.");
  kernels.def("quantise_bytes", quantise_bytes_of_array, nb::arg("dst"), nb::arg("src"), nb::arg("magnitudes"),
              nb::arg("contributions"), nb::arg("operation"), nb::arg("worker"), nb::arg("lost") = nb::none(), isa(),
              "float32 to int8 in units of each block, rounded at random; `lost` takes what rounding left.");
  kernels.def("dequantise_bytes", dequantise_bytes_of_array, nb::arg("dst"), nb::arg("src"), nb::arg("magnitudes"),
              nb::arg("contributions"), isa(), "The inverse of quantise_bytes, on a sum.");
  kernels.def("quantise", quantise_array, nb::arg("dst"), nb::arg("src"), nb::arg("exponents"),
              nb::arg("headroom_bits"), nb::arg("first_element") = 0, isa(),
              "float32 to int32 in units of each block; `exponents` covers the operation from its first element.");
  kernels.def("dequantise", dequantise_array, nb::arg("dst"), nb::arg("src"), nb::arg("exponents"),
              nb::arg("headroom_bits"), nb::arg("first_element") = 0, isa(), "The inverse of quantise, on a sum.");
  kernels.def(
      "is_defined",
      [](const std::string& op, const std::string& dtype) {
        return kSerialTable.reduce[index(parse<ReduceOp>("operator", op, kReduceOpCount))][index(parse_dtype(dtype))] !=
               nullptr;
      },
      nb::arg("op"), nb::arg("dtype"), "Whether `reduce` has a meaning for this pair.");
  kernels.def("available_isas", available_isas, "The instruction sets that this CPU can run.");
  kernels.def("active_isa", [] { return name(active_isa()); }, "The instruction set that this process uses.");
  kernels.def("isa_reason", isa_reason, "Why it was chosen, in one sentence.");
  kernels.attr("block_elements") = kQuantiseBlock;
  kernels.attr("exponent_all_zero") = kExponentAllZero;
  kernels.attr("exponent_non_finite") = kExponentNonFinite;
  kernels.attr("max_headroom_bits") = kMaxHeadroomBits;
  kernels.attr("max_byte_contributions") = kMaxByteContributions;
}
