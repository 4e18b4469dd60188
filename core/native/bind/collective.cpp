// netfold._native.failover: the decisions of a SwitchPath, for the search over recovery.
// netfold._native.shares: how an all_reduce is split between switches and a host algorithm.
#include <netfold/collective/failover.hpp>
#include <netfold/collective/shares.hpp>

#include <algorithm>
#include <numeric>

#include "convert.hpp"

using netfold::collective::Failover;
using netfold::collective::Shares;

void bind_failover(nb::module_& m) {
  nb::module_ f = m.def_submodule("failover");
  nb::class_<Failover> failover(f, "Failover");
  failover.def(nb::init<std::uint64_t>(), "generation"_a)
      .def_prop_ro("is_up", &Failover::is_up)
      .def_prop_ro("generation", &Failover::generation)
      .def(
          "freeze",
          [](Failover& self, std::uint64_t generation) {
            const Failover::Frozen frozen = self.freeze(generation);
            return nb::make_tuple(static_cast<int>(frozen.which), frozen.promised);
          },
          "generation"_a, "Which membership it was (0 none, 1 current, 2 standing by), and whether it was promised.")
      .def("accepts_results", &Failover::accepts_results, "generation"_a)
      .def("offers_results", &Failover::offers_results, "generation"_a)
      .def(
          "fall_back",
          [](Failover& self, std::uint64_t generation, std::uint64_t end, bool promised) {
            return static_cast<int>(self.fall_back(generation, end, promised));
          },
          "generation"_a, "end"_a, "promised"_a)
      .def("stand_by", &Failover::stand_by, "generation"_a)
      .def("promise", &Failover::promise, "generation"_a)
      .def("announce", &Failover::announce)
      .def(
          "start", [](Failover& self, std::uint64_t number) { return static_cast<int>(self.start(number)); },
          "number"_a, "The operation's mode: 0 channel, 1 undecided, 2 host.")
      .def("entered", &Failover::entered, "number"_a, "first_chunk"_a)
      .def("finish", &Failover::finish, "number"_a)
      .def(
          "mode", [](const Failover& self, std::uint64_t number) { return static_cast<int>(self.mode(number)); },
          "number"_a)
      .def("host_operation", &Failover::host_operation)
      .def(
          "follow",
          [](Failover& self, std::uint64_t number, std::uint64_t announced) {
            return static_cast<int>(self.follow(number, announced));
          },
          "number"_a, "announced"_a, "0 whole, 1 again, 2 adopted, 3 unknown.");
  bind_value(failover);
}

void bind_shares(nb::module_& m) {
  nb::module_ s = m.def_submodule("shares");
  nb::class_<Shares>(s, "Shares")
      .def(
          "__init__",
          [](Shares* self, std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link,
             std::vector<std::uint32_t> fixed) {
            if (switches.empty() || host == 0 || std::ranges::count(switches, 0u) != 0) {
              throw nb::value_error("shares need at least one switch, and rates above 0");
            }
            const auto total = std::accumulate(fixed.begin(), fixed.end(), std::uint64_t{0});
            if ((!fixed.empty() && fixed.size() != switches.size()) || total > Shares::kWhole) {
              throw nb::value_error("fixed parts: expected one for each switch, and WHOLE at most in total");
            }
            new (self) Shares(std::move(switches), host, link, std::move(fixed));
          },
          "switches"_a, "host"_a, "link"_a, "fixed"_a = std::vector<std::uint32_t>{},
          "Rates in tensor bytes per second: of each switch, of a host algorithm, of a rank's link.")
      .def_prop_ro("parts", &Shares::parts)
      .def_prop_ro("balanced", &Shares::balanced)
      .def_prop_ro("learns", &Shares::learns)
      .def_prop_ro("operations", &Shares::operations)
      .def_prop_ro(
          "paths",
          [](const Shares& self) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t>> paths;
            for (const Shares::Rates& path : self.paths()) paths.emplace_back(path.beside, path.alone);
            return paths;
          },
          "(bytes per second beside the other paths, alone) of each switch and, last, of the host algorithm.")
      .def("skip", &Shares::skip)
      .def(
          "learn",
          [](Shares& self, const std::vector<std::tuple<std::uint64_t, std::uint64_t>>& paths) {
            if (paths.size() != self.paths().size()) {
              throw nb::value_error("expected one pair of rates for each switch, and one for the host algorithm");
            }
            std::vector<Shares::Rates> rates;
            for (const auto& [beside, alone] : paths) rates.push_back({beside, alone});
            self.learn(rates);
          },
          "paths"_a, "As `paths`, of one operation; 0 where the operation tells nothing.");
  s.attr("WHOLE") = Shares::kWhole;
}
