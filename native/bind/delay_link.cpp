// netfold._native.delay_link: links that take time, for an emulated rack.
#include <nanobind/stl/string.h>
#include <netfold/delay_link/delay_links.hpp>

#include "module.hpp"

namespace nb = nanobind;
namespace delay_link = netfold::delay_link;

void bind_delay_link(nb::module_& m) {
  nb::module_ c = m.def_submodule("delay_link");
  nb::exception<delay_link::DelayLinkError>(c, "DelayLinkError", PyExc_OSError);
  nb::class_<delay_link::DelayLinks>(c, "DelayLinks")
      .def(nb::init<>())
      .def(
          "add",
          [](delay_link::DelayLinks& self, const std::string& netns, const std::string& device,
             const std::string& other_netns, const std::string& other_device,
             std::int64_t delay_ns) { return self.add({netns, device}, {other_netns, other_device}, delay_ns); },
          nb::arg("netns"), nb::arg("device"), nb::arg("other_netns"), nb::arg("other_device"), nb::arg("delay_ns"))
      .def("start", &delay_link::DelayLinks::start)
      .def(
          "set_faults",
          [](delay_link::DelayLinks& self, std::size_t link, double duplicate_ratio, double reorder_ratio,
             std::int64_t reorder_ns,
             std::uint64_t seed) { self.set_faults(link, {duplicate_ratio, reorder_ratio, reorder_ns}, seed); },
          nb::arg("link"), nb::arg("duplicate_ratio"), nb::arg("reorder_ratio"), nb::arg("reorder_ns"), nb::arg("seed"))
      .def("stop", &delay_link::DelayLinks::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("dropped", &delay_link::DelayLinks::dropped);
}
