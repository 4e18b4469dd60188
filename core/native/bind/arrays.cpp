// netfold._native.arrays: the memory behind any framework's array (DLPack or the buffer protocol), without a copy.
#include <nanobind/ndarray.h>

#include "module.hpp"

namespace {

std::string type_name_of(nb::handle array) { return nb::cast<std::string>(nb::type_name(array.type())); }

// bf16, i8, u8, ...; also c64 and c128, which travel as other types. Empty: the type cannot travel.
std::string dtype_name(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  if (dtype.lanes != 1) return {};
  const int bits = dtype.bits;
  const bool whole = bits == 8 || bits == 16 || bits == 32 || bits == 64;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Int:
      return whole ? "i" + std::to_string(bits) : "";
    case Code::UInt:
      return whole ? "u" + std::to_string(bits) : "";
    case Code::Float:
      return bits == 16 || bits == 32 || bits == 64 ? "f" + std::to_string(bits) : "";
    case Code::Bfloat:
      return bits == 16 ? "bf16" : "";
    case Code::Bool:
      return bits == 8 ? "bool" : "";
    case Code::Complex:
      return bits == 64 || bits == 128 ? "c" + std::to_string(bits) : "";
    default:
      return {};
  }
}

// An exported array. The exporter keeps the memory while this object lives.
class ExportedArray {
 public:
  ExportedArray(nb::handle array, bool writable) {
    const bool imported = writable ? import_as<Writable>(writable_export(array)) : import_as<Readable>(array);
    if (!imported) refuse(array);
    dtype_ = dtype_name(array_.dtype());
    if (dtype_.empty()) {
      const auto dtype = array_.dtype();
      throw nb::type_error(("arrays of DLPack type " + std::to_string(dtype.code) + " with " +
                            std::to_string(dtype.bits) + " bits cannot travel")
                               .c_str());
    }
  }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(array_.data()); }
  std::size_t bytes() const { return array_.nbytes(); }
  const std::string& dtype() const { return dtype_; }
  nb::tuple shape() const {
    nb::list out;
    for (std::size_t i = 0; i < array_.ndim(); ++i) out.append(array_.shape(i));
    return nb::tuple(out);
  }

 private:
  using Readable = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
  using Writable = nb::ndarray<nb::c_contig, nb::device::cpu>;

  // An export before DLPack 1.0 cannot say that it is read-only, and immutable arrays (JAX's) use it. So take such an
  // export for read-only, as NumPy does.
  static nb::object writable_export(nb::handle array) {
    if (!nb::hasattr(array, "__dlpack__")) return nb::borrow(array);
    nb::object capsule = array.attr("__dlpack__")("max_version"_a = nb::make_tuple(1, 0));
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") == 0) {
      throw nb::value_error(
          ("the " + type_name_of(array) +
           " cannot take a result: its DLPack export does not say that it may be written (before DLPack "
           "1.0, or immutable); pass a writable array for that")
              .c_str());
    }
    return capsule;
  }

  template <class Kind>
  bool import_as(nb::handle from) {
    Kind imported;
    if (!nb::try_cast(from, imported, false)) return false;
    array_ = nb::ndarray<nb::ro>(imported);
    return true;
  }

  [[noreturn]] static void refuse(nb::handle array) {
    const std::string what = type_name_of(array);
    nb::ndarray<nb::ro> any;
    if (!nb::try_cast(array, any, false)) {
      throw nb::type_error((what + " is no array: it exports neither DLPack nor the buffer protocol").c_str());
    }
    if (any.device_type() != nb::device::cpu::value) {
      throw nb::type_error(("a " + what + " on DLPack device type " + std::to_string(any.device_type()) +
                            " is not in host memory; copy it to the CPU first")
                               .c_str());
    }
    Readable contiguous;
    if (!nb::try_cast(array, contiguous, false)) {
      throw nb::value_error(("the " + what + " must be C-contiguous; pass a contiguous copy").c_str());
    }
    throw nb::value_error(
        ("the " + what + " is read-only and cannot take a result; pass a writable array for that").c_str());
  }

  nb::ndarray<nb::ro> array_;
  std::string dtype_;
};

}  // namespace

void bind_arrays(nb::module_& m) {
  nb::module_ a = m.def_submodule("arrays", "The memory behind any framework's array.");
  nb::class_<ExportedArray>(a, "ExportedArray")
      .def(nb::init<nb::handle, bool>(), "array"_a, "writable"_a)
      .def_prop_ro("address", &ExportedArray::address)
      .def_prop_ro("bytes", &ExportedArray::bytes)
      .def_prop_ro("dtype", &ExportedArray::dtype)
      .def_prop_ro("shape", &ExportedArray::shape);
}
