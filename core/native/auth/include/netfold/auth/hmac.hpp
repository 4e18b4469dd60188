// HMAC-SHA256 of OpenSSL's libcrypto: proofs of a shared secret, and secrets that are derived from another.
#pragma once

#include <netfold/auth/records.hpp>

#include <cstddef>
#include <span>

namespace netfold::auth {

// Precondition: unavailable_reason() is empty.
Secret hmac(std::span<const std::byte> key, std::span<const std::byte> data);
// In constant time.
bool equal(std::span<const std::byte, kSecretBytes> a, std::span<const std::byte, kSecretBytes> b);

}  // namespace netfold::auth
