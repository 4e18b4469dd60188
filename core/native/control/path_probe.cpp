#include <poll.h>
#include <netfold/control/path_probe.hpp>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace netfold::control {

using transport::Datagrams;
using transport::now_ns;

std::optional<std::uint64_t> exchange_hello(Datagrams& port, Datagrams::Peer to, const Hello& hello,
                                            const std::optional<auth::Key>& key, std::int64_t timeout_ns) {
  constexpr std::int64_t kRetryNs = 20'000'000;
  std::optional<auth::PacketAuthenticator> authenticator;
  if (key) authenticator.emplace(*key);
  const std::size_t bytes = std::max(hello.packet_bytes, protocol::kHeaderBytes);
  std::vector<std::byte> packet(bytes + (key ? auth::kMacBytes : 0));
  protocol::Header header{.flags = protocol::kHello, .job = hello.job, .incarnation = hello.incarnation};
  header.packet_number = hello.nonce;
  header.worker = hello.worker;
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
    with_nonce.packet_number = hello.nonce;
    if (!(with_nonce == header)) return;
    if (authenticator && !authenticator->verify(protocol::nonce_of(received.data(), bytes), received)) return;
    back = view->header().packet_number;
  };
  const auto take = [&](std::span<const Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      if (train.source == to) transport::for_each_packet(train, read);
    }
  };
  const iovec whole{packet.data(), packet.size()};
  const std::int64_t deadline = now_ns() + timeout_ns;
  while (!back && now_ns() < deadline) {
    Datagrams::Run run{.to = to, .pieces = {&whole, 1}, .packet_bytes = packet.size()};
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

}  // namespace netfold::control
