// netfold._native.transport: ports for packets, as far as joining a switch needs them from Python.
#include "transport.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <time.h>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include <cstring>

#include "auth.hpp"
#include "module.hpp"

namespace nb = nanobind;
namespace fabric = netfold::transport::fabric;
namespace protocol = netfold::protocol;
namespace transport = netfold::transport;

std::unique_ptr<transport::Datagrams> DataPort::take() {
  if (!port) throw nb::value_error("this port was given to a group or a job before");
  if (to == transport::Datagrams::kUnknownPeer) throw nb::value_error("this port is not connected");
  return std::move(port);
}

namespace {

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Sends a hello of `packet_bytes`, and its tag where there is a key, until it comes back; 20 ms between tries. The
// number that it came back with: its nonce, or the proof of a switch on a fabric.
std::optional<std::uint64_t> hello(DataPort& self, std::uint32_t job, std::uint32_t incarnation, std::uint16_t worker,
                                   std::uint64_t nonce, std::size_t packet_bytes, const std::optional<nb::bytes>& key,
                                   std::int64_t timeout_ns) {
  if (!self.port || self.to == transport::Datagrams::kUnknownPeer) {
    throw nb::value_error("this port is not connected, or was given to a group");
  }
  transport::Datagrams& port = *self.port;
  std::optional<netfold::auth::PacketAuthenticator> authenticator;
  if (key) authenticator.emplace(key_of(*key));
  nb::gil_scoped_release release;
  const std::size_t bytes = std::max(packet_bytes, protocol::kHeaderBytes);
  std::vector<std::byte> packet(bytes + (key ? netfold::auth::kMacBytes : 0));
  protocol::Header header{.flags = protocol::kHello, .job = job, .incarnation = incarnation};
  header.packet_number = nonce;
  header.worker = worker;
  protocol::write_header(header, packet.data());
  if (authenticator) {
    const iovec untagged{packet.data(), bytes};
    authenticator->mac(protocol::nonce_of(packet.data(), bytes), {&untagged, 1}, packet.data() + bytes);
  }
  std::optional<std::uint64_t> back;
  const auto look = [&](std::span<const std::byte> came) {
    if (came.size() != packet.size()) return;
    const auto view = protocol::PacketView::parse(came);
    if (!view) return;
    protocol::Header with_nonce = view->header();
    with_nonce.packet_number = nonce;
    if (!(with_nonce == header)) return;
    if (authenticator && !authenticator->verify(protocol::nonce_of(came.data(), bytes), came)) return;
    back = view->header().packet_number;
  };
  const auto take = [&](std::span<const transport::Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      if (train.source == self.to) transport::for_each_packet(train, look);
    }
  };
  const iovec piece{packet.data(), packet.size()};
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  while (!back && monotonic_ns() < deadline) {
    transport::Datagrams::Run run{.to = self.to, .pieces = {&piece, 1}, .packet_bytes = packet.size()};
    const std::uint64_t refused = port.counters().send_errors;
    port.send({&run, 1});
    // This length does not even leave the host.
    if (port.counters().send_errors > refused && port.counters().last_send_errno == EMSGSIZE) return std::nullopt;
    const std::int64_t again = std::min(deadline, monotonic_ns() + 20'000'000);
    while (!back) {
      if (port.receive(take)) continue;
      const std::int64_t left_ns = again - monotonic_ns();
      if (left_ns <= 0) break;
      const auto hint = port.wait_hint(false);
      pollfd wait{hint.fd, hint.events, 0};
      const std::int64_t poll_after_ns = hint.poll_after_ns < 0 ? left_ns : std::min(left_ns, hint.poll_after_ns);
      const timespec wait_for{.tv_sec = 0, .tv_nsec = poll_after_ns};
      ::ppoll(&wait, hint.fd < 0 ? 0 : 1, &wait_for, nullptr);
    }
  }
  return back;
}

nb::bytes as_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

void bind_transport(nb::module_& m) {
  nb::module_ t = m.def_submodule("transport");
  t.def(
      "granted_receive_buffer",
      [](std::size_t bytes) {
        return transport::UdpSocket(transport::Address::parse("0.0.0.0", 0), bytes).receive_buffer_bytes();
      },
      nb::arg("bytes"), "What the kernel grants a socket that asks for so many bytes, as it reports it.");
  nb::class_<DataPort>(t, "DataPort", "Packets to a switch and back, until a group takes it over.")
      .def("hello", &hello, nb::kw_only(), nb::arg("job"), nb::arg("incarnation"), nb::arg("worker"), nb::arg("nonce"),
           nb::arg("packet_bytes"), nb::arg("key").none(), nb::arg("timeout_ns"),
           "The number with which packets of this length, and a tag behind it where there is a key, come back from the "
           "switch, which knows our place then; None: they do not.")
      .def_prop_ro(
          "last_send_error",
          [](const DataPort& self) -> std::string {
            if (!self.port) throw nb::value_error("this port was given to a group");
            return self.port->counters().last_send_error;
          },
          "Why this host or the provider last refused to send packets, or says that they did not arrive; empty: "
          "never.");
  nb::class_<UdpPort, DataPort>(t, "UdpPort")
      .def(
          "__init__",
          [](UdpPort* self, const std::string& host, std::size_t buffer_bytes) {
            new (self) UdpPort;
            auto socket = std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes);
            self->socket = socket.get();
            self->port = std::move(socket);
          },
          nb::arg("host"), nb::arg("buffer_bytes"))
      .def_prop_ro("port", [](const UdpPort& self) { return self.port ? self.socket->local().port() : 0; })
      .def(
          "connect",
          [](UdpPort& self, const std::string& host, std::uint16_t port) {
            if (!self.port) throw nb::value_error("this port was given to a group");
            self.to = self.socket->add(transport::Address::parse(host, port));
          },
          nb::arg("host"), nb::arg("port"));
  nb::class_<FabricPort, DataPort>(t, "FabricPort", "An endpoint on a provider of libfabric.")
      .def(
          "__init__",
          [](FabricPort* self, const std::string& provider, const std::string& host, std::size_t packet_bytes,
             std::size_t in_flight_bytes) {
            new (self) FabricPort;
            auto endpoint = std::make_unique<fabric::FabricDatagrams>(fabric::open_named_endpoint(provider, host, 0),
                                                                      packet_bytes, in_flight_bytes, 1);
            self->endpoint = endpoint.get();
            self->port = std::move(endpoint);
          },
          nb::arg("provider"), nb::arg("host"), nb::arg("packet_bytes"), nb::arg("in_flight_bytes"),
          "FabricError where there is none. `packet_bytes`: of the longest; `in_flight_bytes`: of packets each way.")
      .def_prop_ro("address",
                   [](const FabricPort& self) {
                     if (!self.port) throw nb::value_error("this port was given to a group");
                     nb::dict place;
                     place["provider"] = self.endpoint->limits().provider;
                     place["name"] = as_bytes(self.endpoint->name());
                     place["tag"] = self.endpoint->tag(0);
                     place["packet_bytes"] = self.endpoint->packet_bytes();
                     return place;
                   })
      .def(
          "connect",
          [](FabricPort& self, const nb::bytes& name, std::uint64_t tag) {
            if (!self.port) throw nb::value_error("this port was given to a group");
            const auto* first = reinterpret_cast<const std::byte*>(name.c_str());
            self.endpoint->connect(0, {first, name.size()}, tag);
            self.to = 0;
          },
          nb::arg("name"), nb::arg("tag"));
}
