// netfold._native.transport: the datagram socket, as far as joining a switch needs it from Python.
#include "transport.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <time.h>
#include <netfold/protocol/packet.hpp>

#include <cstring>

#include "module.hpp"
#include "seal.hpp"

namespace nb = nanobind;
namespace protocol = netfold::protocol;
namespace transport = netfold::transport;

namespace {

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Sends a hello of `packet_bytes`, and its tag where there is a key, until it comes back; 20 ms between tries.
bool hello(UdpPort& port, const std::string& host, std::uint16_t to_port, std::uint32_t job, std::uint32_t incarnation,
           std::uint16_t worker, std::uint64_t nonce, std::size_t packet_bytes, const std::optional<nb::bytes>& key,
           std::int64_t timeout_ns) {
  if (!port.socket) throw nb::value_error("this port was given to a group");
  std::optional<netfold::seal::Sealer> sealer;
  if (key) sealer.emplace(key_of(*key));
  nb::gil_scoped_release release;
  const auto to = transport::Address::parse(host, to_port);
  std::vector<std::byte> packet(std::max(packet_bytes, protocol::kHeaderBytes));
  protocol::Header header{.flags = protocol::kHello, .job = job, .incarnation = incarnation};
  header.counter = nonce;
  header.worker = worker;
  protocol::write_header(header, packet.data());
  if (sealer) {
    const std::size_t bytes = packet.size();
    packet.resize(bytes + netfold::seal::kTagBytes);
    const iovec untagged{packet.data(), bytes};
    sealer->tag(protocol::nonce_of(packet.data(), bytes), {&untagged, 1}, packet.data() + bytes);
  }
  const iovec piece{packet.data(), packet.size()};
  const transport::UdpSocket::Run run{.to = &to, .pieces = {&piece, 1}, .packet_bytes = packet.size()};
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  bool back = false;
  while (!back && monotonic_ns() < deadline) {
    try {
      port.socket->send({&run, 1});
    } catch (const std::system_error& error) {
      if (error.code().value() == EMSGSIZE) return false;  // this length does not even leave the host
      throw;
    }
    pollfd wait{port.socket->fd(), POLLIN, 0};
    ::poll(&wait, 1, 20);
    port.socket->receive([&](std::span<const std::byte> bytes, const transport::Address& source) {
      back |=
          source == to && bytes.size() == packet.size() && std::memcmp(bytes.data(), packet.data(), packet.size()) == 0;
    });
  }
  return back;
}

}  // namespace

void bind_transport(nb::module_& m) {
  nb::module_ t = m.def_submodule("transport");
  nb::class_<UdpPort>(t, "UdpPort", "A bound datagram socket, until a group takes it over.")
      .def(
          "__init__",
          [](UdpPort* self, const std::string& host, int buffer_bytes) {
            new (self)
                UdpPort{std::make_unique<transport::UdpSocket>(transport::Address::parse(host, 0), buffer_bytes)};
          },
          nb::arg("host"), nb::arg("buffer_bytes"))
      .def_prop_ro("port", [](const UdpPort& self) { return self.socket ? self.socket->local().port() : 0; })
      .def("hello", &hello, nb::arg("host"), nb::arg("port"), nb::arg("job"), nb::arg("incarnation"), nb::arg("worker"),
           nb::arg("nonce"), nb::arg("packet_bytes"), nb::arg("key").none(), nb::arg("timeout_ns"),
           "Whether packets of this length, and a tag behind it where there is a key, pass to the switch and back; "
           "registers this address with it.");
}
