// netfold._native.fabric: endpoints on a fabric, and their streams until a group takes them.
#include <poll.h>
#include <netfold/engine/event.hpp>
#include <netfold/transport/fabric/libfabric.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include <algorithm>

#include "convert.hpp"
#include "transport.hpp"

using netfold::engine::now_ns;
namespace fabric = netfold::transport::fabric;
using fabric::FabricPipe;
using fabric::StreamMux;

namespace {

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

nb::dict counters_of(const StreamMux& self) {
  const auto counters = self.counters();
  const auto& registrations = counters.registrations;
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
  out["registration_hits"] = registrations.hits;
  out["registration_misses"] = registrations.misses;
  out["registration_evictions"] = registrations.evictions;
  out["registrations"] = registrations.entries;
  out["registered_bytes"] = registrations.bytes;
  return out;
}

FabricPipe& pipe_of(FabricStream& stream) {
  if (stream.pipe == nullptr) throw nb::value_error("this stream was given to a group before, or closed");
  return *stream.pipe;
}

std::string failure_of(FabricStream& stream) {
  const auto& pipe = pipe_of(stream);
  return pipe.mux()->failure(pipe.stream());
}

void throw_if(bool closed, const FabricPipe::Io& io) {
  if (closed) throw fabric::Error(io.why != nullptr ? *io.why : std::string("the other end of the stream is closed"));
}

// Calls `try_once` without the GIL until it returns true, and sleeps on the descriptors of `add_fds` between two calls.
// False: the deadline passed before.
template <class TryOnce, class AddFds>
bool retry(std::int64_t deadline, const TryOnce& try_once, const AddFds& add_fds) {
  const nb::gil_scoped_release released;
  std::vector<pollfd> fds;
  while (!try_once()) {
    const std::int64_t left_ns = deadline - now_ns();
    if (left_ns <= 0) return false;
    fds.clear();
    add_fds(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<std::int64_t>(left_ns / 1'000'000 + 1, 1000)));
  }
  return true;
}

// Returns the number of bytes that `move` moved within the time.
template <class Move>
std::size_t move_all(FabricPipe& pipe, std::byte* data, std::size_t bytes, short events, std::int64_t timeout_ns,
                     const Move& move) {
  const std::int64_t deadline = now_ns() + timeout_ns;
  std::size_t moved = 0;
  const auto move_some = [&] {
    for (;;) {
      const iovec rest{data + moved, bytes - moved};
      const FabricPipe::Io io = move(rest);
      moved += io.bytes;
      throw_if(io.closed && moved < bytes, io);
      if (moved == bytes || io.bytes == 0 || now_ns() >= deadline) return moved == bytes;
    }
  };
  retry(deadline, move_some, [&](std::vector<pollfd>& fds) { pipe.wait_for(events, fds); });
  return moved;
}

std::size_t send_all(FabricStream& stream, const nb::bytes& data, std::int64_t timeout_ns) {
  FabricPipe& pipe = pipe_of(stream);
  auto* first = const_cast<std::byte*>(bytes_of(data).data());
  return move_all(pipe, first, data.size(), POLLOUT, timeout_ns,
                  [&](const iovec& rest) { return pipe.send({&rest, 1}); });
}

nb::bytes receive_all(FabricStream& stream, std::size_t bytes, std::int64_t timeout_ns) {
  FabricPipe& pipe = pipe_of(stream);
  std::vector<std::byte> into(bytes);
  into.resize(move_all(pipe, into.data(), bytes, POLLIN, timeout_ns,
                       [&](const iovec& rest) { return pipe.receive({&rest, 1}); }));
  return to_bytes(into);
}

// Returns when the caller may use the memory again. False: the time was over before, and the endpoint is closed then.
bool put_all(FabricStream& stream, std::uintptr_t address, std::size_t bytes, std::uint64_t name,
             std::int64_t timeout_ns) {
  FabricPipe& pipe = pipe_of(stream);
  const iovec chunk{reinterpret_cast<void*>(address), bytes};
  bool is_taken = false;
  const auto put = [&] {
    if (!is_taken) {
      const auto io = pipe.put({&chunk, 1}, name);
      is_taken = io.bytes > 0;
      throw_if(io.closed, io);
    }
    if (is_taken && pipe.bytes_in_flight() == 0) return true;
    if (pipe.hung_up()) throw fabric::Error(pipe.mux()->failure(pipe.stream()));
    return false;
  };
  const bool done =
      retry(now_ns() + timeout_ns, put, [&](std::vector<pollfd>& fds) { pipe.wait_for(is_taken ? 0 : POLLOUT, fds); });
  if (!done && is_taken) without_gil([&] { pipe.force_close(); });
  return done;
}

bool flush(FabricStream& stream, std::int64_t timeout_ns) {
  FabricPipe& pipe = pipe_of(stream);
  return retry(
      now_ns() + timeout_ns, [&] { return pipe.flush(); }, [&](std::vector<pollfd>& fds) { pipe.wait_to_flush(fds); });
}

}  // namespace

void bind_fabric(nb::module_& m) {
  nb::module_ f = m.def_submodule("fabric");
  // NOLINTNEXTLINE: registered for its effect
  nb::exception<fabric::Error>(f, "FabricError", PyExc_OSError);
  f.def("version", &fabric::library_version, "The version of libfabric. FabricError: there is no usable one.");
  f.def("providers", &providers, "All providers of libfabric; `why_not` is empty if netfold can use the provider.");

  nb::class_<fabric::Doorbell>(f, "Doorbell", "Wakes the driver of the streams that were opened with it.");
  f.def("make_doorbell", [] { return std::make_shared<fabric::Doorbell>(); });

  nb::class_<netfold::transport::Pipe::RegistrationUses>(f, "RegistrationLease",
                                                         "Keeps the registration of memory while it lives.");
  nb::class_<StreamMux>(f, "StreamMux", "This process's endpoint on a fabric, one rail for each interface.")
      .def(nb::new_([](const std::string& provider, const std::vector<std::string>& hosts) {
             nb::gil_scoped_release release;
             std::vector<std::unique_ptr<fabric::Endpoint>> rails;
             for (const std::string& host : hosts) {
               rails.push_back(fabric::open_named_endpoint(provider, host, static_cast<int>(rails.size())));
             }
             return std::make_shared<StreamMux>(std::move(rails));
           }),
           "provider"_a, "hosts"_a, "hosts: addresses of this host's interfaces, one for each rail.")
      .def_prop_ro("provider", [](const StreamMux& self) { return self.limits().provider; })
      .def_prop_ro("version", [](const StreamMux& self) { return self.limits().version; })
      .def_prop_ro(
          "domains",
          [](const StreamMux& self) {
            nb::list out;
            for (std::size_t rail = 0; rail < self.rails(); ++rail) out.append(self.limits(rail).domain);
            return out;
          },
          "Interfaces or devices, by rail.")
      .def_prop_ro("names",
                   [](const StreamMux& self) {
                     nb::list out;
                     for (const auto& name : self.names()) out.append(to_bytes(name));
                     return out;
                   })
      .def_prop_ro("counters", &counters_of)
      .def_prop_ro("is_open", &StreamMux::is_open, "False: its endpoint had to be closed.")
      .def("force_close", &StreamMux::force_close, "why"_a, Release(),
           "Close the endpoint: the provider has no memory of this process any more, and all streams fail.")
      .def_prop_ro("why_not_rma", &StreamMux::why_not_rma,
                   "Why large chunks travel in segments; empty: they are written to the peer's memory.")
      .def(
          "set",
          [](StreamMux& self, std::size_t rma_min_bytes, std::size_t registrations, std::size_t registered_bytes) {
            self.set({.rma_min_bytes = rma_min_bytes,
                      .registrations = {.entries = registrations, .bytes = registered_bytes}});
          },
          "rma_min_bytes"_a, "registration_cache_entries"_a, "registration_cache_bytes"_a,
          "Set the smallest chunk that streams opened from now on write to the peer's memory, and the bounds of the "
          "registration cache.")
      .def(
          "lease",
          [](StreamMux& self, std::uintptr_t address, std::size_t bytes) {
            return self.lease(reinterpret_cast<std::byte*>(address), bytes,
                              fabric::RegistrationCache::Lifetime::persistent);
          },
          "address"_a, "bytes"_a,
          "Keep the registration of this memory while the result lives. The mapping must not change during that.")
      .def("progress", &StreamMux::make_progress, Release(), "Do the provider's pending work, for all streams.")
      .def(
          "open",
          [](const std::shared_ptr<StreamMux>& self, std::shared_ptr<fabric::Doorbell> doorbell, std::size_t streams) {
            return FabricStream{std::make_unique<FabricPipe>(self, self->open(std::move(doorbell), streams))};
          },
          "doorbell"_a, "streams"_a, "One of `streams` that are opened together.");

  nb::class_<FabricStream>(f, "Stream", "This rank's end of a byte stream to another rank.")
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
            std::vector<std::vector<std::byte>> peer_names;
            for (const nb::bytes& name : names) peer_names.push_back(copy_of(name));
            nb::gil_scoped_release release;
            const auto [tag, window, segment_bytes, rma_min_bytes] = params;
            pipe.mux()->connect(pipe.stream(), peer_names, {tag, window, segment_bytes, rma_min_bytes});
          },
          "names"_a, "params"_a)
      .def_prop_ro("failure", &failure_of, "Why the stream sends nothing any more; empty: it works.")
      .def("send", &send_all, "data"_a, "timeout_ns"_a, "The number of bytes that were sent within the time.")
      .def("receive", &receive_all, "bytes"_a, "timeout_ns"_a, "Up to `bytes`; fewer if the time was over.")
      .def(
          "post_receive",
          [](FabricStream& self, std::uint64_t name, std::uintptr_t address, std::size_t bytes) {
            return pipe_of(self).post_receive(name, reinterpret_cast<std::byte*>(address), bytes);
          },
          "name"_a, "address"_a, "bytes"_a, "Set the memory for the chunk that the peer will put under `name`.")
      .def("put", &put_all, "address"_a, "bytes"_a, "name"_a, "timeout_ns"_a,
           "Write a chunk to the memory that the peer posted under `name`. False: not within the time.")
      .def("flush", &flush, "timeout_ns"_a, "Wait until all sent bytes are on their way without further progress here.")
      .def("close", [](FabricStream& self) {
        nb::gil_scoped_release release;
        self.pipe.reset();
      });
}
