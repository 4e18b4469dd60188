// netfold._native.failover: the decisions of a SwitchPath, for the search over recovery.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <netfold/collective/failover.hpp>

#include "convert.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using netfold::collective::Failover;

void bind_failover(nb::module_& m) {
  nb::module_ f = m.def_submodule("failover");
  nb::class_<Failover>(f, "Failover")
      .def(nb::init<std::uint64_t>(), "generation"_a)
      .def("copy", [](const Failover& self) { return Failover(self); })
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
          "number"_a, "announced"_a, "0 whole, 1 again, 2 adopted, 3 unknown.")
      .def("canonical", &canonical<Failover>);
}
