// netfold._native.kernels: the kernels on NumPy arrays, for tests and diagnostics. Collectives call the kernels from
// C++.
//
// An array is C-contiguous memory whose element size is the named dtype's. Its own dtype does not matter (bf16 comes as
// uint16), and it needs no alignment. `isa`: the instruction set to run; the default is the process's active one.
// Misuse raises ValueError before the kernel writes anything.
#include <nanobind/ndarray.h>
#include <numeric>

#include <netfold/kernels/byte_quantise.hpp>
#include <netfold/kernels/copy.hpp>
#include <netfold/kernels/isa.hpp>

#include "module.hpp"
// Private to the component, and included here alone: comparing instruction sets needs tables other than the active one.
#include "../kernels/tables.hpp"

namespace {

using namespace netfold::kernels;

using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using IsaName = std::optional<std::string>;

[[noreturn]] void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

template <class Enum>
Enum parse(const char* kind, const std::string& text, int value_count) {
  std::string known;
  for (int i = 0; i < value_count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (text == name(value)) return value;
    known += std::string(i == 0 ? "" : ", ") + name(value);
  }
  refuse(std::string(kind) + " '" + text + "' is unknown; expected one of " + known);
}

DType parse_dtype(const std::string& text) { return parse<DType>("dtype", text, kDTypeCount); }
ReduceOp parse_reduce_op(const std::string& text) { return parse<ReduceOp>("operator", text, kReduceOpCount); }

const Table& table_of(const IsaName& isa) {
  if (!isa) return active_table();
  const Table* table = find_table(parse<Isa>("instruction set", *isa, 3));
  if (table == nullptr) refuse("instruction set '" + *isa + "' is not available on this CPU");
  return *table;
}

template <class Value>
Value* data_of(const Output& array) {
  return static_cast<Value*>(array.data());
}

template <class Value>
const Value* data_of(const Input& array) {
  return static_cast<const Value*>(array.data());
}

// The number of elements.
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
  const auto op = parse_reduce_op(op_name);
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

// Averages partial means of `ranks` each, as the call that all of them belong to; without `finishes` a partial mean.
void average_arrays(const std::string& dtype_name, Output dst, const std::vector<Input>& sources,
                    const std::vector<std::uint32_t>& ranks, bool finishes, const IsaName& isa) {
  const DType dtype = parse_dtype(dtype_name);
  Table::Average* const kernel = table_of(isa).average[index(dtype)];
  if (kernel == nullptr) refuse("there is no average of " + dtype_name);
  if (sources.empty() || sources.size() != ranks.size()) refuse("average needs sources, and the ranks of each");
  const std::size_t count = count_of(dst, dtype, "dst");
  const std::uint32_t all = std::accumulate(ranks.begin(), ranks.end(), 0u);
  std::vector<const void*> pointers;
  std::vector<float> scales;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::string role = "source " + std::to_string(i);
    expect_count(count_of(sources[i], dtype, role), count, role);
    pointers.push_back(sources[i].data());
    scales.push_back(mean_scale(ranks[i], all));
  }
  kernel(dst.data(), pointers.data(), pointers.size(), 0, count,
         {.scales = scales.data(), .ranks = finishes ? all : 1});
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
  copy(data_of<std::byte>(dst), data_of<std::byte>(src), count, streams);
}

void block_exponents_of_array(Output exponents, Input src, const IsaName& isa) {
  const std::size_t count = count_of(src, DType::f32, "src");
  expect_count(count_of(exponents, DType::i16, "exponents"), quantise_block_count(count), "exponents");
  std::vector<std::int32_t> magnitudes(quantise_block_count(count));
  block_magnitudes(magnitudes.data(), data_of<float>(src), count, table_of(isa));
  block_exponents(data_of<std::int16_t>(exponents), magnitudes.data(), magnitudes.size());
}

void block_magnitudes_of_array(Output magnitudes, Input src, const IsaName& isa) {
  const std::size_t count = count_of(src, DType::f32, "src");
  expect_count(count_of(magnitudes, DType::i32, "magnitudes"), quantise_block_count(count), "magnitudes");
  block_magnitudes(data_of<std::int32_t>(magnitudes), data_of<float>(src), count, table_of(isa));
}

// The number of elements, after all checks that the i8 functions share.
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
  quantise_bytes(data_of<std::int8_t>(dst), data_of<float>(src), lost ? data_of<float>(*lost) : nullptr, count,
                 data_of<std::int32_t>(magnitudes), byte_levels_for(contributions), rounding_key(operation, worker), 0,
                 table_of(isa));
}

void dequantise_bytes_of_array(Output dst, Input src, Input magnitudes, int contributions, int ranks,
                               const IsaName& isa) {
  const std::size_t count = check_bytes(dst, DType::f32, src, DType::i8, magnitudes, contributions);
  dequantise_bytes(data_of<float>(dst), data_of<std::int8_t>(src), count, data_of<std::int32_t>(magnitudes),
                   byte_levels_for(contributions) * ranks, table_of(isa));
}

// The number of elements, after all checks that the i32 functions share.
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
  quantise(data_of<std::int32_t>(dst), data_of<float>(src), count, data_of<std::int16_t>(exponents), headroom_bits,
           first_element, table_of(isa));
}

void dequantise_array(Output dst, Input src, Input exponents, int headroom_bits, std::size_t first_element,
                      std::uint32_t ranks, const IsaName& isa) {
  const std::size_t count = check_quantised(dst, DType::f32, src, DType::i32, exponents, headroom_bits, first_element);
  dequantise(data_of<float>(dst), data_of<std::int32_t>(src), count, data_of<std::int16_t>(exponents), headroom_bits,
             ranks, first_element, table_of(isa));
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
  const auto isa = [] { return "isa"_a = nb::none(); };
  kernels.def("reduce", reduce_arrays, "op"_a, "dtype"_a, "dst"_a, "sources"_a, isa(),
              "dst[i] = op over all sources[k][i], reduced in the order of `sources`; dst may be a source.");
  kernels.def("average", average_arrays, "dtype"_a, "dst"_a, "sources"_a, "ranks"_a, "finishes"_a, isa(),
              "dst[i] = the partial mean, or the average, of all sources[k][i], each of ranks[k] ranks.");
  kernels.def("convert", convert_array, "to"_a, "dst"_a, "from_"_a, "src"_a, isa(),
              "dst = src as dtype `to`; narrowing rounds to nearest even.");
  kernels.def("copy", copy_array, "dst"_a, "src"_a, "streams"_a, "dst = src, both u8; streams: write past the caches.");
  kernels.def("block_exponents", block_exponents_of_array, "exponents"_a, "src"_a, isa(),
              "The i32 wire format's exponent for each block of `block_elements` float32.");
  kernels.def("block_magnitudes", block_magnitudes_of_array, "magnitudes"_a, "src"_a, isa(),
              "The bits of the greatest magnitude in each block of `block_elements` float32, as int32.");
  kernels.def("quantise_bytes", quantise_bytes_of_array, "dst"_a, "src"_a, "magnitudes"_a, "contributions"_a,
              "operation"_a, "worker"_a, "lost"_a = nb::none(), isa(),
              "float32 to int8 in units of each block, with stochastic rounding; lost: receives the rounding errors.");
  kernels.def("dequantise_bytes", dequantise_bytes_of_array, "dst"_a, "src"_a, "magnitudes"_a, "contributions"_a,
              "ranks"_a = 1, isa(), "The inverse of quantise_bytes, on a sum; divided by the ranks.");
  kernels.def("quantise", quantise_array, "dst"_a, "src"_a, "exponents"_a, "headroom_bits"_a, "first_element"_a = 0,
              isa(), "float32 to int32 in units of each block; exponents: of the operation from its first element on.");
  kernels.def("dequantise", dequantise_array, "dst"_a, "src"_a, "exponents"_a, "headroom_bits"_a, "first_element"_a = 0,
              "ranks"_a = 1, isa(), "The inverse of quantise, on a sum; divided by the ranks.");
  kernels.def(
      "is_defined",
      [](const std::string& op, const std::string& dtype) {
        return kSerialTable.reduce[index(parse_reduce_op(op))][index(parse_dtype(dtype))] != nullptr;
      },
      "op"_a, "dtype"_a, "Whether `reduce` has a meaning for this pair.");
  kernels.def("available_isas", available_isas, "The instruction sets that this CPU can run.");
  kernels.def("active_isa", [] { return name(active_isa()); }, "The instruction set that this process uses.");
  kernels.def("isa_reason", isa_reason, "Why this process uses that instruction set, in one sentence.");
  kernels.attr("block_elements") = kQuantiseBlock;
  kernels.attr("exponent_all_zero") = kExponentAllZero;
  kernels.attr("exponent_non_finite") = kExponentNonFinite;
  kernels.attr("max_headroom_bits") = kMaxHeadroomBits;
  kernels.attr("max_byte_contributions") = kMaxByteContributions;
}
