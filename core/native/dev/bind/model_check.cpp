// netfold._native_dev.model_check: the search over the protocol's machines, and its traces.
#include <netfold/model_check/search.hpp>

#include "convert.hpp"
#include "dev_module.hpp"

using namespace netfold::model_check;

namespace {

// The fields of netfold::model_check::Scope. Throws nb::key_error for a missing field.
Scope scope_of(const nb::kwargs& fields) {
  Scope scope;
  const auto read = [&](const char* name, auto& into) { into = field<std::decay_t<decltype(into)>>(fields, name); };
  read("workers", scope.workers);
  read("leaves", scope.leaves);
  read("window", scope.window);
  read("operations", scope.operations);
  read("last", scope.last);
  read("foreign_packets", scope.foreign_packets);
  read("restarts", scope.restarts);
  read("numbers", scope.numbers);
  read("timeouts", scope.timeouts);
  read("pipelines", scope.pipelines);
  read("chunk_bits", scope.chunk_bits);
  read("outlives", scope.outlives);
  read("rogue", scope.rogue);
  if (fields.contains("max_states")) read("max_states", scope.max_states);
  const auto network = field<std::string>(fields, "network");
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
  p.def("search", [](const nb::kwargs& fields) {
    const Scope scope = scope_of(fields);
    return without_gil([&] { return search(scope); });
  });
  p.def("search_validation", &search_validation, "workers"_a);
  p.def(
      "replay",
      [](const std::vector<std::string>& steps, const nb::kwargs& fields) { return replay(scope_of(fields), steps); },
      "steps"_a, "fields"_a);
}
