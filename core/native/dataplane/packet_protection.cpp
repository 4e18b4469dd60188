#include "packet_protection.hpp"

#include <netfold/protocol/packet.hpp>

#include <algorithm>

namespace netfold::dataplane {
namespace {

iovec as_iovec(std::span<const std::byte> bytes) { return {const_cast<std::byte*>(bytes.data()), bytes.size()}; }

}  // namespace

bool verify_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes) {
  return bytes.size() >= protocol::kHeaderBytes + auth::kMacBytes &&
         authenticator.verify(protocol::nonce_of(bytes.data(), bytes.size() - auth::kMacBytes), bytes);
}

void authenticate_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet, std::byte* mac) {
  const iovec all = as_iovec(packet);
  authenticator.mac(protocol::nonce_of(packet.data(), packet.size()), {&all, 1}, mac);
}

std::span<const std::byte> open_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes,
                                       std::vector<std::byte>& plain) {
  if (bytes.size() < protocol::kHeaderBytes + auth::kMacBytes) return {};
  const auth::Nonce nonce = protocol::nonce_of(bytes.data(), bytes.size() - auth::kMacBytes);
  return authenticator.open(nonce, bytes, protocol::kHeaderBytes, plain);
}

const std::byte* protect_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet,
                                std::byte* encrypted, std::byte* mac) {
  if (!authenticator.encrypts()) {
    authenticate_packet(authenticator, packet, mac);
    return packet.data();
  }
  const auto header = packet.first(protocol::kHeaderBytes);
  const iovec values = as_iovec(packet.subspan(protocol::kHeaderBytes));
  if (encrypted != packet.data()) std::copy(header.begin(), header.end(), encrypted);
  authenticator.encrypt(protocol::nonce_of(packet.data(), packet.size()), header, {&values, 1},
                        encrypted + protocol::kHeaderBytes, mac);
  return encrypted;
}

}  // namespace netfold::dataplane
