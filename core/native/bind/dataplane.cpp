// netfold._native.dataplane: a switch's packet path, controlled by netfold.switch.
#include <netfold/dataplane/data_plane.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include "auth.hpp"
#include "convert.hpp"
#include "transport.hpp"

namespace auth = netfold::auth;
namespace dataplane = netfold::dataplane;
namespace fabric = netfold::transport::fabric;
using dataplane::DataPlane;

namespace {

nb::dict as_dict(const dataplane::JobCounters& counters) {
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
  out["drops"] = drops_of(counters.drops);
  out["parent_drops"] = drops_of(counters.parent_drops);
  return out;
}

}  // namespace

void bind_dataplane(nb::module_& m) {
  nb::module_ a = m.def_submodule("dataplane");
  nb::class_<DataPlane>(a, "DataPlane")
      .def(
          "__init__",
          [](DataPlane* self, int core, double busy_poll_s) {
            new (self) DataPlane({.core = core, .busy_poll_ns = static_cast<std::int64_t>(busy_poll_s * 1e9)});
          },
          "core"_a = -1, "busy_poll_s"_a = 0.0,
          "core: the core that the thread is pinned to, with the slots of its jobs in memory near that core; -1: any. "
          "busy_poll_s: how long the thread polls for packets after the last one before it sleeps. ValueError: the "
          "core "
          "is not available.")
      .def(
          "open",
          [](DataPlane& self, std::uint32_t job, std::uint32_t incarnation, const std::string& host,
             const std::vector<std::uint64_t>& nonces, const std::vector<nb::bytes>& hello_keys,
             std::size_t buffer_bytes) {
            const auto keys = keys_of(hello_keys);
            nb::gil_scoped_release release;
            return self.open(job, incarnation, host, nonces, keys, buffer_bytes);
          },
          "job"_a, "incarnation"_a, "host"_a, "nonces"_a, "hello_keys"_a, "buffer_bytes"_a)
      .def(
          "open_on_fabric",
          [](DataPlane& self, std::uint32_t job, std::uint32_t incarnation, const std::string& provider,
             const std::string& host, const std::vector<std::uint64_t>& nonces,
             const std::vector<std::uint64_t>& proofs, const std::vector<nb::bytes>& hello_keys,
             std::size_t packet_bytes, std::size_t in_flight_bytes) {
            const auto keys = keys_of(hello_keys);
            std::string resolved;
            const auto address = without_gil([&] {
              auto endpoint = fabric::open_named_endpoint(provider, host, 0);
              resolved = endpoint->limits().provider;
              return self.open_on_fabric(job, incarnation, std::move(endpoint), nonces, proofs, keys, packet_bytes,
                                         in_flight_bytes);
            });
            nb::dict out;
            out["provider"] = resolved;
            out["name"] = to_bytes(address.name);
            out["tags"] = address.tags;
            out["packet_bytes"] = address.packet_bytes;
            out["buffer_bytes"] = address.buffer_bytes;
            return out;
          },
          nb::kw_only(), "job"_a, "incarnation"_a, "provider"_a, "host"_a, "nonces"_a, "proofs"_a, "hello_keys"_a,
          "packet_bytes"_a, "in_flight_bytes"_a,
          "The job's address on that fabric. FabricError: the fabric has no such endpoint.")
      .def(
          "set_worker_fabric_address",
          [](DataPlane& self, std::uint32_t job, std::uint16_t worker, const nb::bytes& name, std::uint64_t tag) {
            const auto bytes = copy_of(name);
            nb::gil_scoped_release release;
            self.set_worker_fabric_address(job, worker, bytes, tag);
          },
          "job"_a, "worker"_a, "name"_a, "tag"_a)
      .def("set_worker_address", &DataPlane::set_worker_address, "job"_a, "worker"_a, "host"_a, "port"_a,
           "local"_a = "", Release())
      .def("receive_buffer_bytes", &DataPlane::receive_buffer_bytes, Release())
      .def(
          "connect_parent",
          [](DataPlane& self, std::uint32_t job, DataPort& port) {
            auto taken = port.take();
            nb::gil_scoped_release release;
            self.connect_parent(job, std::move(taken), port.to);
          },
          "job"_a, "port"_a, "port: connected to the parent; the job takes it.")
      .def(
          "begin",
          [](DataPlane& self, std::uint32_t job, std::uint32_t epoch, std::uint32_t incarnation, std::uint16_t workers,
             std::uint32_t window, std::uint32_t payload_bytes,
             const std::optional<std::tuple<std::vector<nb::bytes>, nb::bytes>>& keys, const PythonParent& parent,
             const std::optional<std::tuple<nb::bytes, nb::bytes>>& parent_keys, std::vector<std::uint16_t> names,
             bool encrypts) {
            std::optional<dataplane::JobKeys> job_keys;
            if (keys) job_keys = {keys_of(std::get<0>(*keys)), key_of(std::get<1>(*keys))};
            std::optional<dataplane::ParentKeys> link_keys;
            if (parent_keys) link_keys = {key_of(std::get<0>(*parent_keys)), key_of(std::get<1>(*parent_keys))};
            nb::gil_scoped_release release;
            self.begin({job, epoch, incarnation, workers, window, payload_bytes, link_of(parent), std::move(names)},
                       job_keys, link_keys, encrypts ? auth::Security::encrypt : auth::Security::authenticate);
          },
          nb::kw_only(), "job"_a, "epoch"_a, "incarnation"_a, "workers"_a, "window"_a, "payload_bytes"_a,
          "keys"_a.none(), "parent"_a = nb::none(), "parent_keys"_a = nb::none(),
          "names"_a = std::vector<std::uint16_t>{}, "encrypts"_a = false,
          "keys: of contributions, by worker, and of results; None: packets without MACs. parent_keys: of sums, and of "
          "the parent's results. encrypts: packets with keys are also encrypted, here and to the parent.")
      .def("close", &DataPlane::close, Release())
      .def("missing", &DataPlane::missing, Release())
      .def(
          "read",
          [](DataPlane& self) {
            const auto reading = without_gil([&] { return self.read(); });
            nb::dict jobs;
            for (const auto& [id, counters] : reading.jobs) jobs[nb::int_(id)] = as_dict(counters);
            return nb::make_tuple(reading.cpu_ns, jobs);
          },
          "(CPU time of the thread in ns, counters of each job by its id). Waits for one round of the thread.")
      .def("counters", [](DataPlane& self, std::uint32_t job) -> nb::object {
        const auto counters = without_gil([&] { return self.counters(job); });
        if (!counters) return nb::none();
        return as_dict(*counters);
      });
}
