// netfold._native.failover: the decisions of a SwitchPath, for the search over recovery.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <netfold/collective/failover.hpp>

#include "module.hpp"

namespace nb = nanobind;
using netfold::collective::Failover;

void bind_failover(nb::module_& m) {
  nb::module_ f = m.def_submodule("failover");
  nb::class_<Failover>(f, "Failover")
      .def(nb::init<std::uint64_t>(), nb::arg("generation"))
      .def("copy", [](const Failover& self) { return Failover(self); })
      .def_prop_ro("is_up", &Failover::is_up)
      .def_prop_ro("is_down", &Failover::is_down)
      .def_prop_ro("generation", &Failover::generation)
      .def(
          "freeze",
          [](Failover& self, std::uint64_t generation) {
            const Failover::Frozen frozen = self.freeze(generation);
            return nb::make_tuple(static_cast<int>(frozen.which), frozen.promised);
          },
          nb::arg("generation"),
          "Which membership it was (0 none, 1 current, 2 standing), and whether it was promised.")
      .def("accepts_results", &Failover::accepts_results, nb::arg("generation"))
      .def("offers_results", &Failover::offers_results, nb::arg("generation"))
      .def(
          "fall_back",
          [](Failover& self, std::uint64_t generation, std::uint64_t end, bool promised) {
            return static_cast<int>(self.fall_back(generation, end, promised));
          },
          nb::arg("generation"), nb::arg("end"), nb::arg("promised"))
      .def("stand_by", &Failover::stand_by, nb::arg("generation"))
      .def("promise", &Failover::promise, nb::arg("generation"))
      .def("announce", &Failover::announce)
      .def(
          "start", [](Failover& self, std::uint64_t number) { return static_cast<int>(self.start(number)); },
          nb::arg("number"), "Its mode: 0 channel, 1 undecided, 2 host.")
      .def("entered", &Failover::entered, nb::arg("number"), nb::arg("first_chunk"))
      .def("finish", &Failover::finish, nb::arg("number"))
      .def(
          "mode", [](const Failover& self, std::uint64_t number) { return static_cast<int>(self.mode(number)); },
          nb::arg("number"))
      .def("host_operation", &Failover::host_operation)
      .def(
          "follow",
          [](Failover& self, std::uint64_t number, std::uint64_t announced) {
            return static_cast<int>(self.follow(number, announced));
          },
          nb::arg("number"), nb::arg("announced"), "0 whole, 1 again, 2 adopted, 3 unknown.")
      .def("canonical", [](const Failover& self) {
        std::vector<std::byte> bytes;
        self.append_canonical(bytes);
        return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
}
