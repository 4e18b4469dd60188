#include "parent_port.hpp"

#include <netfold/transport/udp/udp_socket.hpp>

#include <algorithm>
#include <array>

#include "packet_protection.hpp"

namespace netfold::dataplane {

using transport::UdpSocket;

namespace {

constexpr std::size_t kPieces = 2;  // of a packet: the sum, and its MAC

}  // namespace

ParentPort::Session::Session(const protocol::SwitchJob& machine, const std::optional<ParentKeys>& keys,
                             auth::Security security)
    : sender(machine.slot_count()) {
  if (!keys) return;
  sum_authenticator.emplace(keys->sums, security);
  result_authenticator.emplace(keys->results, security);
  if (sum_authenticator->encrypts()) encrypted.resize(UdpSocket::kMaxSegments * machine.packet_bytes());
}

bool ParentPort::flush(protocol::SwitchJob& machine) {
  auto& authenticator = session_->sum_authenticator;
  const std::size_t mac_bytes = authenticator ? auth::kMacBytes : 0;
  const std::size_t packet_bytes = machine.packet_bytes() + mac_bytes;
  const std::size_t per_run = UdpSocket::packets_per_message(packet_bytes);
  std::array<std::uint32_t, UdpSocket::kMaxSegments> slots;
  std::array<iovec, kPieces * UdpSocket::kMaxSegments> pieces;
  std::array<std::byte, auth::kMacBytes * UdpSocket::kMaxSegments> macs;
  bool blocked = false;
  while (!blocked) {
    std::size_t count = 0;
    // Ask before a packet number is given out: a number that is not sent looks like a loss to the parent.
    const std::size_t most = std::min(per_run, port_->room(parent_));
    while (count < most) {
      const auto send = session_->sender.poll_send();
      if (!send) break;
      const auto sum = machine.sum(send->slot, send->packet_number);
      std::byte* mac = macs.data() + count * auth::kMacBytes;
      const std::byte* from = sum.data();
      if (authenticator) {
        from = protect_packet(*authenticator, sum, session_->encrypted.data() + count * sum.size(), mac);
      }
      pieces[count * kPieces] = {const_cast<std::byte*>(from), sum.size()};
      pieces[count * kPieces + 1] = {mac, mac_bytes};
      slots[count++] = send->slot;
    }
    if (count == 0) break;
    transport::Datagrams::Run run{.to = parent_,
                                  .pieces = {pieces.data(), count * kPieces},
                                  .pieces_per_packet = kPieces,
                                  .packet_bytes = packet_bytes};
    const std::size_t sent = port_->send({&run, 1});
    for (std::size_t i = sent; i < count; ++i) session_->sender.not_sent(slots[i]);
    blocked = sent < count;
  }
  return std::exchange(blocked_, blocked) != blocked;
}

}  // namespace netfold::dataplane
