// netfold._native.cable: links that take time, for an emulated rack.
#include <nanobind/stl/string.h>
#include <netfold/cable/cables.hpp>

#include "module.hpp"

namespace nb = nanobind;
namespace cable = netfold::cable;

void bind_cable(nb::module_& m) {
  nb::module_ c = m.def_submodule("cable");
  nb::exception<cable::CableError>(c, "CableError", PyExc_OSError);
  nb::class_<cable::Cables>(c, "Cables")
      .def(nb::init<>())
      .def(
          "add",
          [](cable::Cables& self, const std::string& netns, const std::string& device, const std::string& other_netns,
             const std::string& other_device,
             std::int64_t delay_ns) { return self.add({netns, device}, {other_netns, other_device}, delay_ns); },
          nb::arg("netns"), nb::arg("device"), nb::arg("other_netns"), nb::arg("other_device"), nb::arg("delay_ns"))
      .def("start", &cable::Cables::start)
      .def(
          "disturb",
          [](cable::Cables& self, std::size_t cable, double duplicate_ratio, double reorder_ratio,
             std::int64_t reorder_ns,
             std::uint64_t seed) { self.disturb(cable, {duplicate_ratio, reorder_ratio, reorder_ns}, seed); },
          nb::arg("cable"), nb::arg("duplicate_ratio"), nb::arg("reorder_ratio"), nb::arg("reorder_ns"),
          nb::arg("seed"))
      .def("stop", &cable::Cables::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("dropped", &cable::Cables::dropped);
}
