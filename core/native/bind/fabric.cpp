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
  out["streams"] = counters.streams;
  out["max_streams"] = self.max_streams();
  out["receive_bytes"] = counters.receive_bytes;
  out["addresses"] = counters.addresses;
  out["registration_hits"] = registrations.hits;
  out["registration_misses"] = registrations.misses;
  out["registration_evictions"] = registrations.evictions;
  out["registrations"] = registrations.entries;
  out["registered_bytes"] = registrations.bytes;
  return out;
}

FabricStream& opened(FabricStream& stream) {
  if (stream.stream == nullptr) throw nb::value_error("this stream was closed");
  return stream;
}

std::string failure_of(FabricStream& stream) { return opened(stream).mux->failure(stream.stream); }

void throw_if_failed(const FabricStream& stream) {
  const std::string failure = stream.mux->failure(stream.stream);
  if (!failure.empty()) throw fabric::Error(failure);
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
std::size_t move_all(const FabricStream& stream, std::byte* data, std::size_t bytes, short events,
                     std::int64_t timeout_ns, const Move& move) {
  const std::int64_t deadline = now_ns() + timeout_ns;
  std::size_t moved = 0;
  const auto move_some = [&] {
    for (;;) {
      const iovec rest{data + moved, bytes - moved};
      const std::size_t now = move(rest);
      moved += now;
      if (now == 0 && moved < bytes) throw_if_failed(stream);
      if (moved == bytes || now == 0 || now_ns() >= deadline) return moved == bytes;
    }
  };
  retry(deadline, move_some, [&](std::vector<pollfd>& fds) { stream.mux->wait_for(stream.stream, events, fds); });
  return moved;
}

std::size_t send_all(FabricStream& self, const nb::bytes& data, std::int64_t timeout_ns) {
  const FabricStream& stream = opened(self);
  auto* first = const_cast<std::byte*>(bytes_of(data).data());
  return move_all(stream, first, data.size(), POLLOUT, timeout_ns,
                  [&](const iovec& rest) { return stream.mux->send(stream.stream, {&rest, 1}); });
}

nb::bytes receive_all(FabricStream& self, std::size_t bytes, std::int64_t timeout_ns) {
  const FabricStream& stream = opened(self);
  std::vector<std::byte> into(bytes);
  std::span<std::byte> no_gpu;
  into.resize(move_all(stream, into.data(), bytes, POLLIN, timeout_ns,
                       [&](const iovec& rest) { return stream.mux->receive(stream.stream, no_gpu, {&rest, 1}); }));
  return to_bytes(into);
}

// Returns when the caller may use the memory again. False: the time was over before, and the endpoint is closed then.
bool put_all(FabricStream& self, std::uintptr_t address, std::size_t bytes, std::uint64_t name,
             std::int64_t timeout_ns) {
  const auto& [mux, stream] = std::tie(opened(self).mux, self.stream);
  const iovec chunk{reinterpret_cast<void*>(address), bytes};
  bool is_taken = false;
  const auto put = [&] {
    if (!is_taken) is_taken = mux->put(stream, {&chunk, 1}, name, nullptr) > 0;
    if (is_taken && mux->bytes_in_flight(stream) == 0) return true;
    throw_if_failed(self);
    return false;
  };
  const bool done = retry(now_ns() + timeout_ns, put,
                          [&](std::vector<pollfd>& fds) { mux->wait_for(stream, is_taken ? 0 : POLLOUT, fds); });
  if (!done && is_taken) without_gil([&] { mux->force_close("the provider could still use memory of a caller"); });
  return done;
}

bool flush(FabricStream& self, std::int64_t timeout_ns) {
  const FabricStream& stream = opened(self);
  return retry(
      now_ns() + timeout_ns, [&] { return stream.mux->settled(stream.stream); },
      [&](std::vector<pollfd>& fds) { stream.mux->wait_for(stream.stream, 0, fds); });
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
      .def_prop_ro("segment_bytes", &StreamMux::segment_bytes, "Of the longest message.")
      .def_prop_ro("rma_min_bytes", &StreamMux::rma_min_bytes,
                   "The smallest chunk that is written to the peer's memory; 0: none is.")
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
          "Set the smallest chunk that groups formed from now on write to the peer's memory, and the bounds of the "
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
          [](const std::shared_ptr<StreamMux>& self, std::shared_ptr<fabric::Doorbell> doorbell) {
            return FabricStream{self, self->open(std::move(doorbell))};
          },
          "doorbell"_a, "A stream outside of groups.");

  nb::class_<FabricStream>(f, "Stream", "This rank's end of a byte stream to another rank.")
      .def_prop_ro(
          "offer", [](FabricStream& self) { return to_bytes(opened(self).mux->offer(self.stream)); },
          "What the peer must know to connect.")
      .def(
          "connect",
          [](FabricStream& self, const nb::bytes& offer) {
            const auto copy = copy_of(offer);
            nb::gil_scoped_release release;
            opened(self).mux->connect(self.stream, copy);
          },
          "offer"_a, "offer: the peer's.")
      .def_prop_ro("failure", &failure_of, "Why the stream sends nothing any more; empty: it works.")
      .def("send", &send_all, "data"_a, "timeout_ns"_a, "The number of bytes that were sent within the time.")
      .def("receive", &receive_all, "bytes"_a, "timeout_ns"_a, "Up to `bytes`; fewer if the time was over.")
      .def(
          "post_receive",
          [](FabricStream& self, std::uint64_t name, std::uintptr_t address, std::size_t bytes) {
            return opened(self).mux->post_receive(self.stream, name, reinterpret_cast<std::byte*>(address), bytes,
                                                  nullptr);
          },
          "name"_a, "address"_a, "bytes"_a, "Set the memory for the chunk that the peer will put under `name`.")
      .def("put", &put_all, "address"_a, "bytes"_a, "name"_a, "timeout_ns"_a,
           "Write a chunk to the memory that the peer posted under `name`. False: not within the time.")
      .def("flush", &flush, "timeout_ns"_a, "Wait until all sent bytes are on their way without further progress here.")
      .def("close", [](FabricStream& self) {
        nb::gil_scoped_release release;
        self.close();
      });
}
