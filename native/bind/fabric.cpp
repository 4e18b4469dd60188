// netfold._native.fabric: ports on a fabric, and their streams until a group takes them over.
#include "fabric.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <time.h>
#include <netfold/transport/fabric/libfabric.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "module.hpp"

namespace nb = nanobind;
namespace fabric = netfold::transport::fabric;

namespace {

using Names = std::vector<std::vector<std::byte>>;

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

nb::list as_list(const Names& names) {
  nb::list out;
  for (const auto& name : names) out.append(nb::bytes(reinterpret_cast<const char*>(name.data()), name.size()));
  return out;
}

Names as_names(const std::vector<nb::bytes>& names) {
  Names out;
  for (const nb::bytes& name : names) {
    const auto* first = reinterpret_cast<const std::byte*>(name.c_str());
    out.emplace_back(first, first + name.size());
  }
  return out;
}

nb::list providers() {
  nb::list out;
  for (const fabric::Provider& one : fabric::list_providers()) {
    nb::dict entry;
    entry["name"] = one.name;
    entry["version"] = one.version;
    entry["domain"] = one.domain;
    entry["message_bytes"] = one.message_bytes;
    entry["inject_bytes"] = one.inject_bytes;
    entry["can_write"] = one.can_write;
    entry["manual"] = one.manual;
    entry["registration"] = one.registration;
    entry["why_not"] = one.why_not;
    out.append(entry);
  }
  return out;
}

fabric::FabricPipe& pipe_of(FabricStream& end) {
  if (end.pipe == nullptr) throw nb::value_error("this stream was given to a group before, or closed");
  return *end.pipe;
}

// Moves all of `bytes`, and waits for that up to the deadline; how many it were. Throws Error when the stream is over.
template <class Move>
std::size_t move_all(fabric::FabricPipe& pipe, std::byte* data, std::size_t bytes, short events,
                     std::int64_t timeout_ns, Move move) {
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  std::vector<pollfd> fds;
  std::size_t moved = 0;
  for (;;) {
    const iovec piece{data + moved, bytes - moved};
    const auto io = move(piece);
    moved += io.bytes;
    if (io.closed && moved < bytes) {
      throw fabric::Error(io.why != nullptr ? *io.why : std::string("the other end of the stream is closed"));
    }
    const std::int64_t now = monotonic_ns();
    if (moved == bytes || now >= deadline) return moved;
    if (io.bytes > 0) continue;
    fds.clear();
    pipe.wait_for(events, fds);
    const auto left_ms = std::min<std::int64_t>((deadline - now) / 1'000'000 + 1, 1000);
    ::poll(fds.data(), fds.size(), static_cast<int>(left_ms));
  }
}

std::size_t send_all(FabricStream& end, const nb::bytes& data, std::int64_t timeout_ns) {
  fabric::FabricPipe& pipe = pipe_of(end);
  auto* first = reinterpret_cast<std::byte*>(const_cast<char*>(data.c_str()));
  const std::size_t bytes = data.size();
  nb::gil_scoped_release release;
  return move_all(pipe, first, bytes, POLLOUT, timeout_ns, [&](const iovec& piece) { return pipe.send({&piece, 1}); });
}

nb::bytes receive_all(FabricStream& end, std::size_t bytes, std::int64_t timeout_ns) {
  fabric::FabricPipe& pipe = pipe_of(end);
  std::vector<std::byte> into(bytes);
  std::size_t got = 0;
  {
    nb::gil_scoped_release release;
    got = move_all(pipe, into.data(), bytes, POLLIN, timeout_ns,
                   [&](const iovec& piece) { return pipe.receive({&piece, 1}); });
  }
  return nb::bytes(reinterpret_cast<const char*>(into.data()), got);
}

// Until the memory is the caller's again. False where the time was over before; the endpoint is closed then.
bool put_all(FabricStream& end, std::uintptr_t address, std::size_t bytes, std::uint64_t name,
             std::int64_t timeout_ns) {
  fabric::FabricPipe& pipe = pipe_of(end);
  nb::gil_scoped_release release;
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  const iovec piece{reinterpret_cast<void*>(address), bytes};
  std::vector<pollfd> fds;
  bool is_taken = false;
  while (!is_taken || pipe.bytes_in_flight() > 0) {
    if (!is_taken) {
      const auto io = pipe.put({&piece, 1}, name);
      is_taken = io.bytes > 0;
      if (io.closed) throw fabric::Error(io.why != nullptr ? *io.why : std::string("the other end is closed"));
    }
    if (pipe.hung_up()) throw fabric::Error(pipe.mux()->failure(pipe.stream()));
    const std::int64_t left_ns = deadline - monotonic_ns();
    if (left_ns <= 0) {
      if (is_taken) pipe.force_close();
      return false;
    }
    fds.clear();
    pipe.wait_for(is_taken ? 0 : POLLOUT, fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<std::int64_t>(left_ns / 1'000'000 + 1, 1000)));
  }
  return true;
}

bool flush(FabricStream& end, std::int64_t timeout_ns) {
  fabric::FabricPipe& pipe = pipe_of(end);
  nb::gil_scoped_release release;
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  std::vector<pollfd> fds;
  while (!pipe.flush()) {
    const std::int64_t left_ns = deadline - monotonic_ns();
    if (left_ns <= 0) return false;
    fds.clear();
    pipe.wait_to_flush(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<std::int64_t>(left_ns / 1'000'000 + 1, 1000)));
  }
  return true;
}

}  // namespace

void bind_fabric(nb::module_& m) {
  nb::module_ f = m.def_submodule("fabric");
  // NOLINTNEXTLINE: registered for its effect
  nb::exception<fabric::Error>(f, "FabricError", PyExc_OSError);
  f.def("version", &fabric::library_version, "Of libfabric. FabricError where there is none that can be used.");
  f.def("providers", &providers, "All that libfabric finds; `why_not` is empty where netfold can use it.");

  nb::class_<fabric::Doorbell>(f, "Doorbell", "Wakes the driver of the streams that were opened with it.");
  f.def("make_doorbell", [] { return std::make_shared<fabric::Doorbell>(); });

  nb::class_<netfold::transport::Pipe::RegistrationLease>(f, "RegistrationLease",
                                                          "Memory that stays as it is until this ends.");
  nb::class_<fabric::StreamMux>(f, "StreamMux", "This process's place on a fabric.")
      .def(nb::new_([](const std::string& provider, const std::vector<std::string>& hosts) {
             nb::gil_scoped_release release;
             std::vector<std::unique_ptr<fabric::Endpoint>> rails;
             for (const std::string& host : hosts) {
               rails.push_back(fabric::open_named_endpoint(provider, host, static_cast<int>(rails.size())));
             }
             return std::make_shared<fabric::StreamMux>(std::move(rails));
           }),
           nb::arg("provider"), nb::arg("hosts"), "`hosts`: addresses of this host's interfaces, one a rail.")
      .def_prop_ro("provider", [](const fabric::StreamMux& self) { return self.limits().provider; })
      .def_prop_ro("version", [](const fabric::StreamMux& self) { return self.limits().version; })
      .def_prop_ro(
          "domains",
          [](const fabric::StreamMux& self) {
            nb::list out;
            for (std::size_t rail = 0; rail < self.rails(); ++rail) out.append(self.limits(rail).domain);
            return out;
          },
          "Interfaces or devices, by rail.")
      .def_prop_ro("names", [](const fabric::StreamMux& self) { return as_list(self.names()); })
      .def_prop_ro("counters",
                   [](const fabric::StreamMux& self) {
                     const auto counters = self.counters();
                     nb::dict out;
                     out["segments_sent"] = counters.segments_sent;
                     out["segments_received"] = counters.segments_received;
                     out["credits_sent"] = counters.credits_sent;
                     out["refused"] = counters.refused;
                     out["out_of_order"] = counters.out_of_order;
                     out["repeated"] = counters.repeated;
                     out["rails_lost"] = counters.rails_lost;
                     out["rejected"] = counters.rejected;
                     out["writes"] = counters.writes;
                     out["bytes_written"] = counters.bytes_written;
                     out["grants"] = counters.grants;
                     out["grants_cancelled"] = counters.grants_cancelled;
                     const auto& registrations = counters.registrations;
                     out["registration_hits"] = registrations.hits;
                     out["registration_misses"] = registrations.misses;
                     out["registration_evictions"] = registrations.evictions;
                     out["registrations"] = registrations.entries;
                     out["registered_bytes"] = registrations.bytes;
                     return out;
                   })
      .def_prop_ro("is_open", &fabric::StreamMux::is_open, "False once its endpoint had to be closed.")
      .def("force_close", &fabric::StreamMux::force_close, nb::arg("why"), nb::call_guard<nb::gil_scoped_release>(),
           "Closes its endpoint: no memory is the provider's any more, and all streams fail.")
      .def_prop_ro("why_not_rma", &fabric::StreamMux::why_not_rma,
                   "Why large pieces go in segments; empty where they are written to the peer's memory.")
      .def(
          "set",
          [](fabric::StreamMux& self, std::size_t rma_min_bytes, std::size_t registrations,
             std::size_t registered_bytes) {
            self.set({.rma_min_bytes = rma_min_bytes,
                      .registrations = {.entries = registrations, .bytes = registered_bytes}});
          },
          nb::arg("rma_min_bytes"), nb::arg("registration_cache_entries"), nb::arg("registration_cache_bytes"),
          "What is to go the direct path, in streams that are opened from now on, and the bounds of what is kept "
          "registered.")
      .def(
          "lease",
          [](fabric::StreamMux& self, std::uintptr_t address, std::size_t bytes) {
            return self.lease(reinterpret_cast<std::byte*>(address), bytes,
                              fabric::RegistrationCache::Lifetime::persistent);
          },
          nb::arg("address"), nb::arg("bytes"),
          "Memory that stays mapped as it is until the object that comes back ends: its registration is kept so long.")
      .def("progress", &fabric::StreamMux::make_progress, nb::call_guard<nb::gil_scoped_release>(),
           "Does what the provider has to do, for everybody.")
      .def(
          "open",
          [](const std::shared_ptr<fabric::StreamMux>& self, std::shared_ptr<fabric::Doorbell> doorbell,
             std::size_t streams) {
            return FabricStream{std::make_unique<fabric::FabricPipe>(self, self->open(std::move(doorbell), streams))};
          },
          nb::arg("doorbell"), nb::arg("streams"), "One of `streams` that are opened together.");

  nb::class_<FabricStream>(f, "Stream", "This rank's end of a stream of bytes to another.")
      .def_prop_ro("params",
                   [](FabricStream& self) {
                     const auto& pipe = pipe_of(self);
                     const auto params = pipe.mux()->params(pipe.stream());
                     return std::tuple(params.tag, params.window, params.segment_bytes, params.rma_min_bytes);
                   })
      .def(
          "connect",
          [](FabricStream& self, const std::vector<nb::bytes>& names,
             const std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint64_t>& params) {
            const auto& pipe = pipe_of(self);
            const Names theirs = as_names(names);
            nb::gil_scoped_release release;
            const auto [tag, window, segment_bytes, rma_min_bytes] = params;
            pipe.mux()->connect(pipe.stream(), theirs, {tag, window, segment_bytes, rma_min_bytes});
          },
          nb::arg("names"), nb::arg("params"))
      .def_prop_ro(
          "failure",
          [](FabricStream& self) {
            const auto& pipe = pipe_of(self);
            return pipe.mux()->failure(pipe.stream());
          },
          "Why nothing will be sent any more; empty while it works.")
      .def("send", &send_all, nb::arg("data"), nb::arg("timeout_ns"), "How many bytes went within the time.")
      .def("receive", &receive_all, nb::arg("bytes"), nb::arg("timeout_ns"), "Fewer where the time was over.")
      .def(
          "post_receive",
          [](FabricStream& self, std::uint64_t name, std::uintptr_t address, std::size_t bytes) {
            return pipe_of(self).post_receive(name, reinterpret_cast<std::byte*>(address), bytes);
          },
          nb::arg("name"), nb::arg("address"), nb::arg("bytes"), "The place of the piece that the peer will lend.")
      .def("put", &put_all, nb::arg("address"), nb::arg("bytes"), nb::arg("name"), nb::arg("timeout_ns"),
           "Whether the piece was written to where the peer expects it within the time.")
      .def("flush", &flush, nb::arg("timeout_ns"), "Whether all that was sent is on its way, and needs us no more.")
      .def("close", [](FabricStream& self) {
        nb::gil_scoped_release release;
        self.pipe.reset();
      });
}
