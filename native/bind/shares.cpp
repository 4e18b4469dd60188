// netfold._native.shares: what part of an all_reduce goes which way.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netfold/collective/shares.hpp>

#include "module.hpp"

#include <algorithm>

namespace nb = nanobind;
using netfold::collective::Shares;

void bind_shares(nb::module_& m) {
  nb::module_ s = m.def_submodule("shares");
  nb::class_<Shares>(s, "Shares")
      .def(
          "__init__",
          [](Shares* self, std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link,
             std::vector<std::uint32_t> fixed) {
            const auto none = [](std::uint64_t rate) { return rate == 0; };
            std::uint64_t whole = 0;
            for (const std::uint32_t part : fixed) whole += part;
            if (switches.empty() || host == 0 || std::ranges::any_of(switches, none)) {
              throw nb::value_error("a switch at least, and rates above 0");
            }
            if ((!fixed.empty() && fixed.size() != switches.size()) || whole > Shares::kWhole) {
              throw nb::value_error("fixed parts: one a switch, the whole at most in all");
            }
            new (self) Shares(std::move(switches), host, link, std::move(fixed));
          },
          nb::arg("switches"), nb::arg("host"), nb::arg("link"), nb::arg("fixed") = std::vector<std::uint32_t>{},
          "Rates in bytes of tensor a second: of each switch, of a host algorithm, of a rank's link.")
      .def_prop_ro("parts", &Shares::parts)
      .def_prop_ro("balanced", &Shares::balanced)
      .def_prop_ro("is_trial", &Shares::is_trial)
      .def_prop_ro("learns", &Shares::learns)
      .def_prop_ro("operations", &Shares::operations)
      .def_prop_ro(
          "paths",
          [](const Shares& self) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t>> paths;
            for (const Shares::Rates& path : self.paths()) paths.emplace_back(path.beside, path.alone);
            return paths;
          },
          "(bytes a second beside the others, alone) of each switch and, last, of the host algorithm.")
      .def("skip", &Shares::skip)
      .def(
          "learn",
          [](Shares& self, const std::vector<std::tuple<std::uint64_t, std::uint64_t>>& paths) {
            if (paths.size() != self.paths().size()) throw nb::value_error("the ways: each switch, and the host");
            std::vector<Shares::Rates> rates;
            for (const auto& [beside, alone] : paths) rates.push_back({beside, alone});
            self.learn(rates);
          },
          nb::arg("paths"), "As `ways`, of one operation; 0 where it tells nothing.");
  s.attr("WHOLE") = Shares::kWhole;
}
