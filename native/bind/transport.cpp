// netfold._native.transport: ports for packets, as far as joining a switch needs them from Python.
#include "transport.hpp"

#include <poll.h>
#include <netfold/engine/event.hpp>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include "auth.hpp"
#include "convert.hpp"

using netfold::engine::now_ns;
namespace auth = netfold::auth;
namespace fabric = netfold::transport::fabric;
namespace protocol = netfold::protocol;
namespace transport = netfold::transport;
using transport::Datagrams;

Datagrams& DataPort::open() const {
  if (!port) throw nb::value_error("this port was given to a group or a job before");
  return *port;
}

Datagrams& DataPort::connected() const {
  if (to == Datagrams::kUnknownPeer) throw nb::value_error("this port is not connected; call connect first");
  return open();
}

std::unique_ptr<Datagrams> DataPort::take() {
  connected();
  return std::move(port);
}

namespace {

// Sends a hello of `packet_bytes` every 20 ms, with a MAC if there is a key, until the switch sends it back. Returns
// the packet number that came back: the nonce, or the proof of a switch on a fabric.
std::optional<std::uint64_t> hello(DataPort& self, std::uint32_t job, std::uint32_t incarnation, std::uint16_t worker,
                                   std::uint64_t nonce, std::size_t packet_bytes, const std::optional<nb::bytes>& key,
                                   std::int64_t timeout_ns) {
  constexpr std::int64_t kRetryNs = 20'000'000;
  Datagrams& port = self.connected();
  std::optional<auth::PacketAuthenticator> authenticator;
  if (key) authenticator.emplace(key_of(*key));
  nb::gil_scoped_release release;
  const std::size_t bytes = std::max(packet_bytes, protocol::kHeaderBytes);
  std::vector<std::byte> packet(bytes + (key ? auth::kMacBytes : 0));
  protocol::Header header{.flags = protocol::kHello, .job = job, .incarnation = incarnation};
  header.packet_number = nonce;
  header.worker = worker;
  protocol::write_header(header, packet.data());
  if (authenticator) {
    const iovec authenticated{packet.data(), bytes};
    authenticator->mac(protocol::nonce_of(packet.data(), bytes), {&authenticated, 1}, packet.data() + bytes);
  }
  std::optional<std::uint64_t> back;
  const auto read = [&](std::span<const std::byte> received) {
    if (received.size() != packet.size()) return;
    const auto view = protocol::PacketView::parse(received);
    if (!view) return;
    protocol::Header with_nonce = view->header();
    with_nonce.packet_number = nonce;
    if (!(with_nonce == header)) return;
    if (authenticator && !authenticator->verify(protocol::nonce_of(received.data(), bytes), received)) return;
    back = view->header().packet_number;
  };
  const auto take = [&](std::span<const Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      if (train.source == self.to) transport::for_each_packet(train, read);
    }
  };
  const iovec whole{packet.data(), packet.size()};
  const std::int64_t deadline = now_ns() + timeout_ns;
  while (!back && now_ns() < deadline) {
    Datagrams::Run run{.to = self.to, .pieces = {&whole, 1}, .packet_bytes = packet.size()};
    const std::uint64_t refused = port.counters().send_errors;
    port.send({&run, 1});
    // A packet of this length does not even leave the host.
    if (port.counters().send_errors > refused && port.counters().last_send_errno == EMSGSIZE) return std::nullopt;
    const std::int64_t again = std::min(deadline, now_ns() + kRetryNs);
    while (!back) {
      if (port.receive(take)) continue;
      const std::int64_t left_ns = again - now_ns();
      if (left_ns <= 0) break;
      const auto hint = port.wait_hint(false);
      pollfd wait{hint.fd, hint.events, 0};
      const auto timeout =
          transport::timespec_of(hint.poll_after_ns < 0 ? left_ns : std::min(left_ns, hint.poll_after_ns));
      ::ppoll(&wait, hint.fd < 0 ? 0 : 1, &timeout, nullptr);
    }
  }
  return back;
}

}  // namespace

void bind_transport(nb::module_& m) {
  nb::module_ t = m.def_submodule("transport");
  t.def(
      "granted_receive_buffer",
      [](std::size_t bytes) {
        return transport::UdpSocket(transport::Address::parse("0.0.0.0", 0), bytes).receive_buffer_bytes();
      },
      "bytes"_a, "The receive buffer that the kernel grants a socket that asks for `bytes`, as the kernel reports it.");
  nb::class_<DataPort>(t, "DataPort", "A port for packets to and from a switch, until a group or a job takes it.")
      .def("hello", &hello, nb::kw_only(), "job"_a, "incarnation"_a, "worker"_a, "nonce"_a, "packet_bytes"_a,
           "key"_a.none(), "timeout_ns"_a,
           "Send a hello of this length, with a MAC if there is a key, until the switch returns it and so knows this "
           "address. Returns the packet number that came back; None: nothing came.")
      .def_prop_ro(
          "last_send_error", [](const DataPort& self) { return std::string(self.open().counters().last_send_error); },
          "Why this host or the provider last refused to send packets, or reported them as lost; empty: never.");
  nb::class_<UdpPort, DataPort>(t, "UdpPort")
      .def(
          "__init__",
          [](UdpPort* self, const std::string& host, std::size_t buffer_bytes) {
            new (self) UdpPort;
            auto socket = std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes);
            self->socket = socket.get();
            self->port = std::move(socket);
          },
          "host"_a, "buffer_bytes"_a)
      .def_prop_ro("port", [](const UdpPort& self) { return self.port ? self.socket->local().port() : 0; })
      .def(
          "connect",
          [](UdpPort& self, const std::string& host, std::uint16_t port) {
            self.open();
            self.to = self.socket->add(transport::Address::parse(host, port));
          },
          "host"_a, "port"_a);
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
          "provider"_a, "host"_a, "packet_bytes"_a, "in_flight_bytes"_a,
          "packet_bytes: of the longest packet. in_flight_bytes: of packets in each direction. FabricError: there is "
          "no "
          "such endpoint.")
      .def_prop_ro("address",
                   [](const FabricPort& self) {
                     self.open();
                     nb::dict address;
                     address["provider"] = self.endpoint->limits().provider;
                     address["name"] = to_bytes(self.endpoint->name());
                     address["tag"] = self.endpoint->tag(0);
                     address["packet_bytes"] = self.endpoint->packet_bytes();
                     return address;
                   })
      .def(
          "connect",
          [](FabricPort& self, const nb::bytes& name, std::uint64_t tag) {
            self.open();
            self.endpoint->connect(0, bytes_of(name), tag);
            self.to = 0;
          },
          "name"_a, "tag"_a);
}
