// netfold._native.transport: ports for packets, as far as joining a switch needs them from Python.
#include "transport.hpp"

#include <netfold/control/path_probe.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include "auth.hpp"
#include "convert.hpp"

namespace control = netfold::control;
namespace fabric = netfold::transport::fabric;
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

std::optional<std::uint64_t> hello(const DataPort& self, std::uint32_t job, std::uint32_t incarnation,
                                   std::uint16_t worker, std::uint64_t nonce, std::size_t packet_bytes,
                                   const std::optional<nb::bytes>& key, std::int64_t timeout_ns) {
  Datagrams& port = self.connected();
  std::optional<netfold::auth::Key> mac_key;
  if (key) mac_key = key_of(*key);
  return without_gil([&] {
    return control::exchange_hello(port, self.to, {job, incarnation, worker, nonce, packet_bytes}, mac_key, timeout_ns);
  });
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
