// netfold._native.model_check: the search over the protocol's machines, and its traces.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <netfold/model_check/validation_search.hpp>

#include "module.hpp"

namespace nb = nanobind;
using namespace netfold::model_check;

namespace {

using Chunks = std::vector<std::uint32_t>;  // of each operation
using Leaves = std::vector<std::uint16_t>;  // workers below each

Scope scope_of(std::uint16_t workers, const Leaves& leaves, std::uint32_t window, const Chunks& operations,
               const Chunks& last, bool foreign_packets, std::uint32_t restarts, const std::string& network,
               std::uint32_t numbers, std::uint32_t timeouts, std::uint64_t max_states) {
  Scope scope{.workers = workers,
              .leaves = leaves,
              .window = window,
              .operations = operations,
              .last = last,
              .foreign_packets = foreign_packets,
              .restarts = restarts,
              .numbers = numbers,
              .timeouts = timeouts,
              .max_states = max_states};
  if (network == "merged") {
    scope.network = Network::merged;
  } else if (network == "exact") {
    scope.network = Network::exact;
  } else if (network != "monotone") {
    throw nb::value_error("network is monotone, merged or exact");
  }
  return scope;
}

}  // namespace

void bind_model_check(nb::module_& m) {
  nb::module_ p = m.def_submodule("model_check");
  nb::class_<Report>(p, "Report")
      .def_ro("states", &Report::states)
      .def_ro("transitions", &Report::transitions)
      .def_ro("depth", &Report::depth)
      .def_ro("machines", &Report::machines)
      .def_ro("switches", &Report::switches)
      .def_ro("workers", &Report::workers)
      .def_ro("packets", &Report::packets)
      .def_ro("exhausted", &Report::exhausted)
      .def_ro("broken", &Report::broken)
      .def_ro("trace", &Report::trace)
      .def_ro("seconds", &Report::seconds);
  nb::class_<Record>(p, "Record")
      .def_ro("step", &Record::step)
      .def_ro("source", &Record::source)
      .def_ro("to", &Record::to)
      .def_ro("what", &Record::what)
      .def_ro("became", &Record::became)
      .def_ro("state", &Record::state)
      .def_ro("broken", &Record::broken);
  p.def(
      "search",
      [](std::uint16_t workers, const Leaves& leaves, std::uint32_t window, const Chunks& operations,
         const Chunks& last, bool foreign_packets, std::uint32_t restarts, const std::string& network,
         std::uint32_t numbers, std::uint32_t timeouts, std::uint64_t max_states) {
        const Scope scope = scope_of(workers, leaves, window, operations, last, foreign_packets, restarts, network,
                                     numbers, timeouts, max_states);
        const nb::gil_scoped_release released;
        return search(scope);
      },
      nb::kw_only(), nb::arg("workers"), nb::arg("leaves"), nb::arg("window"), nb::arg("operations"), nb::arg("last"),
      nb::arg("foreign_packets"), nb::arg("restarts"), nb::arg("network"), nb::arg("numbers"), nb::arg("timeouts"),
      nb::arg("max_states"));
  p.def("search_validation", &search_validation, nb::arg("workers"));
  p.def(
      "replay",
      [](std::uint16_t workers, const Leaves& leaves, std::uint32_t window, const Chunks& operations,
         const Chunks& last, bool foreign_packets, std::uint32_t restarts, const std::string& network,
         std::uint32_t numbers, std::uint32_t timeouts, const std::vector<std::string>& steps) {
        return replay(scope_of(workers, leaves, window, operations, last, foreign_packets, restarts, network, numbers,
                               timeouts, 0),
                      steps);
      },
      nb::kw_only(), nb::arg("workers"), nb::arg("leaves"), nb::arg("window"), nb::arg("operations"), nb::arg("last"),
      nb::arg("foreign_packets"), nb::arg("restarts"), nb::arg("network"), nb::arg("numbers"), nb::arg("timeouts"),
      nb::arg("steps"));
}
