// The packets that show that a path between a worker and its switch passes packets of some length, both ways.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/transport/datagrams.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace netfold::control {

// A worker's hello packet.
struct Hello {
  std::uint32_t job = 0;
  std::uint32_t incarnation = 0;
  std::uint16_t worker = 0;
  std::uint64_t nonce = 0;
  std::size_t packet_bytes = 0;  // header and values
};

// Sends the hello every 20 ms, with a MAC if there is a key, until the switch sends it back. Returns the packet number
// that came back: the nonce, or the proof of a switch on a fabric. nullopt: nothing came within `timeout_ns`, or a packet
// of this length does not leave this host. Throws std::system_error where the port fails.
std::optional<std::uint64_t> exchange_hello(transport::Datagrams& port, transport::Datagrams::Peer to,
                                            const Hello& hello, const std::optional<auth::Key>& key,
                                            std::int64_t timeout_ns);

}  // namespace netfold::control
