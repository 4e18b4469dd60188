// Conversions that several bindings need.
#pragma once

#include <nanobind/operators.h>
#include <netfold/protocol/switch_job.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

#include "module.hpp"

inline nb::bytes to_bytes(std::span<const std::byte> data) {
  return nb::bytes(reinterpret_cast<const char*>(data.data()), data.size());
}

// Borrows `bytes`.
inline std::span<const std::byte> bytes_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

inline std::vector<std::byte> copy_of(const nb::bytes& bytes) {
  const auto data = bytes_of(bytes);
  return {data.begin(), data.end()};
}

// A machine is a value: `copy`, `==` and, with its canonical bytes, `canonical`.
template <class Machine>
void bind_value(nb::class_<Machine>& machine) {
  machine.def("copy", [](const Machine& self) { return Machine(self); });
  machine.def(nb::self == nb::self);
  if constexpr (requires(const Machine& self, std::vector<std::byte>& out) { self.append_canonical(out); }) {
    machine.def("canonical", [](const Machine& self) {
      std::vector<std::byte> out;
      self.append_canonical(out);
      return to_bytes(out);
    });
  }
}

// The result of `action`, which runs without the GIL.
template <class Action>
auto without_gil(Action action) {
  const nb::gil_scoped_release released;
  return action();
}

// A keyword argument that several functions take. Throws nb::key_error for a missing one.
template <class Value>
Value field(const nb::kwargs& fields, const char* name) {
  return nb::cast<Value>(fields[name]);
}

// Counters by the name of the reason, `none` left out.
inline nb::dict drops_of(const std::uint64_t (&drops)[netfold::protocol::kDropCount]) {
  nb::dict out;
  for (int i = 1; i < netfold::protocol::kDropCount; ++i) {
    out[netfold::protocol::name(static_cast<netfold::protocol::Drop>(i))] = drops[i];
  }
  return out;
}

// A leaf's place at its parent, as the parent assigned it: job, epoch, incarnation, worker.
using PythonParent = std::optional<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint16_t>>;

inline std::optional<netfold::protocol::ParentLink> link_of(const PythonParent& parent) {
  if (!parent) return std::nullopt;
  return std::make_from_tuple<netfold::protocol::ParentLink>(*parent);
}
