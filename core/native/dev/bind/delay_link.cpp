// netfold._native_dev.delay_link: links with delay and faults, for an emulated rack.
#include <netfold/delay_link/delay_links.hpp>

#include "dev_module.hpp"

using netfold::delay_link::DelayLinks;

void bind_delay_link(nb::module_& m) {
  nb::module_ c = m.def_submodule("delay_link");
  nb::exception<netfold::delay_link::DelayLinkError>(c, "DelayLinkError", PyExc_OSError);
  nb::class_<DelayLinks>(c, "DelayLinks")
      .def(nb::init<>())
      .def(
          "add",
          [](DelayLinks& self, const std::string& netns, const std::string& device, const std::string& other_netns,
             const std::string& other_device,
             std::int64_t delay_ns) { return self.add({netns, device}, {other_netns, other_device}, delay_ns); },
          "netns"_a, "device"_a, "other_netns"_a, "other_device"_a, "delay_ns"_a)
      .def("start", &DelayLinks::start)
      .def(
          "set_faults",
          [](DelayLinks& self, std::size_t link, double duplicate_ratio, double reorder_ratio, std::int64_t reorder_ns,
             std::uint64_t seed) { self.set_faults(link, {duplicate_ratio, reorder_ratio, reorder_ns}, seed); },
          "link"_a, "duplicate_ratio"_a, "reorder_ratio"_a, "reorder_ns"_a, "seed"_a)
      .def("stop", &DelayLinks::stop, Release())
      .def("dropped", &DelayLinks::dropped);
}
