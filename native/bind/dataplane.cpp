// netfold._native.dataplane: the data plane, commanded by netfold.switch.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netfold/dataplane/data_plane.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include "auth.hpp"
#include "module.hpp"
#include "transport.hpp"

namespace nb = nanobind;
using netfold::dataplane::DataPlane;
namespace fabric = netfold::transport::fabric;
namespace protocol = netfold::protocol;

namespace {

nb::dict as_dict(const netfold::dataplane::JobCounters& counters) {
  nb::dict out;
  out["contributions"] = counters.contributions;
  out["results"] = counters.results;
  out["result_bytes"] = counters.result_bytes;
  out["results_sent"] = counters.results_sent;
  out["results_resent"] = counters.results_resent;
  out["nacks"] = counters.nacks;
  out["mismatches"] = counters.mismatches;
  out["hellos"] = counters.hellos;
  out["backlog_dropped"] = counters.backlog_dropped;
  out["send_errors"] = counters.send_errors;
  out["last_send_error"] = counters.last_send_error;
  out["receive_calls"] = counters.receive_calls;
  out["received_datagrams"] = counters.received_datagrams;
  out["last_arrivals"] = counters.last_arrivals;
  out["arrivals"] = counters.arrivals;
  out["arrival_lag_ns"] = counters.arrival_lag_ns;
  out["slots"] = counters.slots;
  out["slots_collecting"] = counters.slots_collecting;
  out["slots_summed"] = counters.slots_summed;
  out["sums_sent"] = counters.sums_sent;
  out["sums_resent"] = counters.sums_resent;
  out["parent_nacks"] = counters.parent_nacks;
  nb::dict drops;
  nb::dict parent_drops;
  for (int i = 1; i < protocol::kDropCount; ++i) {
    drops[protocol::name(static_cast<protocol::Drop>(i))] = counters.drops[i];
    parent_drops[protocol::name(static_cast<protocol::Drop>(i))] = counters.parent_drops[i];
  }
  out["drops"] = drops;
  out["parent_drops"] = parent_drops;
  return out;
}

}  // namespace

void bind_dataplane(nb::module_& m) {
  nb::module_ a = m.def_submodule("dataplane");
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<DataPlane>(a, "DataPlane")
      .def(
          "__init__",
          [](DataPlane* self, int core, double busy_poll_s) {
            new (self) DataPlane({.core = core, .busy_poll_ns = static_cast<std::int64_t>(busy_poll_s * 1e9)});
          },
          nb::arg("core") = -1, nb::arg("busy_poll_s") = 0.0,
          "core: that its thread stays on, with its jobs' slots in memory near it; -1: any. busy_poll_s: how long the "
          "thread looks for packets without sleep after the last one. ValueError for a core that is not to be had.")
      .def(
          "open",
          [](DataPlane& self, std::uint32_t job, std::uint32_t incarnation, const std::string& host,
             const std::vector<std::uint64_t>& nonces, const std::vector<nb::bytes>& hello_keys,
             std::size_t buffer_bytes) {
            const auto keys = keys_of(hello_keys);
            nb::gil_scoped_release release;
            return self.open(job, incarnation, host, nonces, keys, buffer_bytes);
          },
          nb::arg("job"), nb::arg("incarnation"), nb::arg("host"), nb::arg("nonces"), nb::arg("hello_keys"),
          nb::arg("buffer_bytes"))
      .def(
          "open_on_fabric",
          [](DataPlane& self, std::uint32_t job, std::uint32_t incarnation, const std::string& provider,
             const std::string& host, const std::vector<std::uint64_t>& nonces,
             const std::vector<std::uint64_t>& proofs, const std::vector<nb::bytes>& hello_keys,
             std::size_t packet_bytes, std::size_t in_flight_bytes) {
            const auto keys = keys_of(hello_keys);
            DataPlane::FabricAddress address;
            std::string resolved;
            {
              nb::gil_scoped_release release;
              auto fabric_endpoint = fabric::open_named_endpoint(provider, host, 0);
              resolved = fabric_endpoint->limits().provider;
              address = self.open_on_fabric(job, incarnation, std::move(fabric_endpoint), nonces, proofs, keys,
                                            packet_bytes, in_flight_bytes);
            }
            nb::dict out;
            out["provider"] = resolved;
            out["name"] = nb::bytes(reinterpret_cast<const char*>(address.name.data()), address.name.size());
            out["tags"] = address.tags;
            out["packet_bytes"] = address.packet_bytes;
            out["buffer_bytes"] = address.buffer_bytes;
            return out;
          },
          nb::kw_only(), nb::arg("job"), nb::arg("incarnation"), nb::arg("provider"), nb::arg("host"),
          nb::arg("nonces"), nb::arg("proofs"), nb::arg("hello_keys"), nb::arg("packet_bytes"),
          nb::arg("in_flight_bytes"), "Where the job is on that fabric. FabricError where it cannot be.")
      .def(
          "set_worker_fabric_address",
          [](DataPlane& self, std::uint32_t job, std::uint16_t worker, const nb::bytes& name, std::uint64_t tag) {
            const auto* first = reinterpret_cast<const std::byte*>(name.c_str());
            const std::vector<std::byte> bytes(first, first + name.size());
            nb::gil_scoped_release release;
            self.set_worker_fabric_address(job, worker, bytes, tag);
          },
          nb::arg("job"), nb::arg("worker"), nb::arg("name"), nb::arg("tag"))
      .def("set_worker_address", &DataPlane::set_worker_address, nb::arg("job"), nb::arg("worker"), nb::arg("host"),
           nb::arg("port"), nb::arg("local") = "", Release())
      .def("receive_buffer_bytes", &DataPlane::receive_buffer_bytes, Release())
      .def(
          "connect_parent",
          [](DataPlane& self, std::uint32_t job, DataPort& port) {
            auto taken = port.take();
            nb::gil_scoped_release release;
            self.connect_parent(job, std::move(taken), port.to);
          },
          nb::arg("job"), nb::arg("port"), "`port`: connected to the parent.")
      .def(
          "begin",
          // parent: job, epoch, incarnation and worker as the parent gave them.
          [](DataPlane& self, std::uint32_t job, std::uint32_t epoch, std::uint32_t incarnation, std::uint16_t workers,
             std::uint32_t window, std::uint32_t payload_bytes,
             const std::optional<std::tuple<std::vector<nb::bytes>, nb::bytes>>& keys,
             const std::optional<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint16_t>>& parent,
             const std::optional<std::tuple<nb::bytes, nb::bytes>>& parent_keys, std::vector<std::uint16_t> names,
             bool encrypts) {
            std::optional<netfold::dataplane::JobKeys> job_keys;
            if (keys) job_keys = {keys_of(std::get<0>(*keys)), key_of(std::get<1>(*keys))};
            std::optional<protocol::ParentLink> link;
            if (parent) link = std::make_from_tuple<protocol::ParentLink>(*parent);
            std::optional<netfold::dataplane::ParentKeys> link_keys;
            if (parent_keys) link_keys = {key_of(std::get<0>(*parent_keys)), key_of(std::get<1>(*parent_keys))};
            nb::gil_scoped_release release;
            self.begin({job, epoch, incarnation, workers, window, payload_bytes, link, std::move(names)}, job_keys,
                       link_keys, encrypts ? netfold::auth::Security::encrypt : netfold::auth::Security::authenticate);
          },
          nb::kw_only(), nb::arg("job"), nb::arg("epoch"), nb::arg("incarnation"), nb::arg("workers"),
          nb::arg("window"), nb::arg("payload_bytes"), nb::arg("keys").none(), nb::arg("parent") = nb::none(),
          nb::arg("parent_keys") = nb::none(), nb::arg("names") = std::vector<std::uint16_t>{},
          nb::arg("encrypts") = false,
          "keys: of contributions, by worker, and of the answers; None without tags. parent_keys: of sums, and of the "
          "parent's answers. encrypts: whether packets with keys are encrypted, here and at the parent.")
      .def("close", &DataPlane::close, Release())
      .def("missing", &DataPlane::missing, Release())
      .def(
          "read",
          [](DataPlane& self) {
            DataPlane::Reading reading;
            {
              nb::gil_scoped_release release;
              reading = self.read();
            }
            nb::dict jobs;
            for (const auto& [id, counters] : reading.jobs) jobs[nb::int_(id)] = as_dict(counters);
            return nb::make_tuple(reading.cpu_ns, jobs);
          },
          "Nanoseconds of CPU time of the thread, and the counters of every job by its id. Waits for one turn of the "
          "thread.")
      .def("counters", [](DataPlane& self, std::uint32_t job) -> nb::object {
        std::optional<netfold::dataplane::JobCounters> counters;
        {
          nb::gil_scoped_release release;
          counters = self.counters(job);
        }
        if (!counters) return nb::none();
        return as_dict(*counters);
      });
}
