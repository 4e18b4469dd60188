// netfold._native.aggregator: the data plane, commanded by netfold.switch.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <netfold/aggregator/plane.hpp>

#include "module.hpp"

namespace nb = nanobind;
using netfold::aggregator::Plane;
namespace protocol = netfold::protocol;

void bind_aggregator(nb::module_& m) {
  nb::module_ a = m.def_submodule("aggregator");
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Plane>(a, "Plane")
      .def(nb::init<>())
      .def("open", &Plane::open, nb::arg("job"), nb::arg("incarnation"), nb::arg("host"), nb::arg("nonces"),
           nb::arg("buffer_bytes"), Release())
      .def("receive_buffer_bytes", &Plane::receive_buffer_bytes, Release())
      .def(
          "begin",
          [](Plane& self, std::uint32_t job, std::uint32_t epoch, std::uint32_t incarnation, std::uint16_t workers,
             std::uint32_t window,
             std::uint32_t payload_bytes) { self.begin({job, epoch, incarnation, workers, window, payload_bytes}); },
          nb::kw_only(), nb::arg("job"), nb::arg("epoch"), nb::arg("incarnation"), nb::arg("workers"),
          nb::arg("window"), nb::arg("payload_bytes"), Release())
      .def("close", &Plane::close, Release())
      .def("missing", &Plane::missing, Release())
      .def("cpu_ns", &Plane::cpu_ns, Release())
      .def("counters", [](Plane& self, std::uint32_t job) -> nb::object {
        std::optional<netfold::aggregator::JobCounters> counters;
        {
          nb::gil_scoped_release release;
          counters = self.counters(job);
        }
        if (!counters) return nb::none();
        nb::dict out;
        out["contributions"] = counters->contributions;
        out["results"] = counters->results;
        out["result_bytes"] = counters->result_bytes;
        out["answers_sent"] = counters->answers_sent;
        out["answers_again"] = counters->answers_again;
        out["notices"] = counters->notices;
        out["mismatches"] = counters->mismatches;
        out["hellos"] = counters->hellos;
        out["backlog_dropped"] = counters->backlog_dropped;
        out["send_errors"] = counters->send_errors;
        out["last_send_error"] = counters->last_send_error;
        out["receive_calls"] = counters->receive_calls;
        out["received_datagrams"] = counters->received_datagrams;
        out["last_arrivals"] = counters->last_arrivals;
        out["arrivals"] = counters->arrivals;
        out["arrival_lag_ns"] = counters->arrival_lag_ns;
        out["slots"] = counters->slots;
        out["slots_collecting"] = counters->slots_collecting;
        nb::dict drops;
        for (int i = 1; i < protocol::kDropCount; ++i) {
          drops[protocol::name(static_cast<protocol::Drop>(i))] = counters->drops[i];
        }
        out["drops"] = drops;
        return out;
      });
}
