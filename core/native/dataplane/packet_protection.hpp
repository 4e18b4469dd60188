// Authenticates, encrypts and verifies whole packets of the aggregation protocol, whose MAC is a trailer.
// With encryption the header stays readable and the MAC covers it.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>

#include <span>
#include <vector>

namespace netfold::dataplane {

// Whether the last kMacBytes of `bytes` are the MAC of a packet with at least a header.
bool verify_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes);

// Writes the MAC of `packet`, unencrypted, to `mac`.
void authenticate_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet, std::byte* mac);

// Returns the packet without its MAC; empty where the MAC is wrong.
// An encrypted packet is decrypted to `plain`, whose size is the packets' length.
std::span<const std::byte> open_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> bytes,
                                       std::vector<std::byte>& plain);

// Writes the MAC of `packet` to `mac`; returns the bytes to send before the MAC: `packet` itself, or its encrypted form
// at `encrypted`, which may be where `packet` is.
const std::byte* protect_packet(auth::PacketAuthenticator& authenticator, std::span<const std::byte> packet,
                                std::byte* encrypted, std::byte* mac);

}  // namespace netfold::dataplane
