// The keys of a worker's packets, from the secrets that its switch gave it (HKDF, RFC 5869): those of
// netfold/switch_protocol/packet_keys.py. docs/reference/protocol.md has the bytes.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>

#include <cstdint>
#include <span>

namespace netfold::control {

// All throw ProtocolError for a secret of another length. secret: the worker's own.
auth::Key hello_key(std::span<const std::byte> secret, std::uint32_t job, std::uint16_t worker);
auth::Key contribution_key(std::span<const std::byte> secret, std::uint32_t job, std::uint32_t epoch,
                           std::uint16_t worker);
// secret: the one of all the job's workers.
auth::Key result_key(std::span<const std::byte> secret, std::uint32_t job, std::uint32_t epoch);

}  // namespace netfold::control
