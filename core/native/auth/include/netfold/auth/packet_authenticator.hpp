// Authenticates packets by AES-128-GMAC, which is AES-GCM with nothing to encrypt (NIST SP 800-38D), or encrypts the
// bytes behind their headers by AES-128-GCM, with the header as additional data.
//
// OpenSSL's libcrypto does the arithmetic. It is opened at run time: building needs no headers, and a host without it
// runs everything but authenticated packets. Keys come from the caller, ready for use.
//
// What must always hold: under one key a nonce is used for one packet's bytes only, whoever computes the MAC. Two
// different packets with one nonce reveal the key.
//
//   .venv/bin/python -m pytest core/tests/native/test_packet_authenticator.py
#pragma once

#include <sys/uio.h>
#include <netfold/auth/records.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace netfold::auth {

inline constexpr std::size_t kKeyBytes = 16;
inline constexpr std::size_t kNonceBytes = 12;
inline constexpr std::size_t kMacBytes = 16;

using Key = std::array<std::byte, kKeyBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

// Returns why this host cannot make a PacketAuthenticator; empty where it can.
const std::string& unavailable_reason();

// One key, expanded once, for packets that are all authenticated or all encrypted. Not thread-safe. Allocates only in
// the constructor.
class PacketAuthenticator {
 public:
  // Throws std::runtime_error with unavailable_reason().
  explicit PacketAuthenticator(const Key& key, Security security = Security::authenticate);

  bool encrypts() const { return security_ == Security::encrypt; }

  // Writes the MAC of the concatenated pieces to out[0, kMacBytes).
  void mac(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out);
  // Whether the last kMacBytes of `packet` are the MAC of the bytes before them, in constant time.
  // Precondition: `packet` has kMacBytes or more.
  bool verify(const Nonce& nonce, std::span<const std::byte> packet);

  // Encrypts the concatenated pieces of a packet with this header to `out`, which may be the only piece's memory, and
  // writes the MAC of header and pieces to `mac`. Precondition: encrypts().
  void encrypt(const Nonce& nonce, std::span<const std::byte> header, std::span<const iovec> pieces, std::byte* out,
               std::byte* mac);
  // Returns `packet` without the MAC at its end, decrypted to `plain` where encrypts(): `plain` has the length of all
  // packets without their MAC, and the first `header_bytes` are not encrypted. Empty: the MAC or the length is wrong.
  // Precondition: `packet` has header_bytes + kMacBytes or more.
  std::span<const std::byte> open(const Nonce& nonce, std::span<const std::byte> packet, std::size_t header_bytes,
                                  std::vector<std::byte>& plain);

 private:
  bool decrypt(const Nonce& nonce, std::span<const std::byte> packet, std::size_t header_bytes, std::byte* out);

  Security security_;
  CryptoHandle cipher_{nullptr, nullptr};
  CryptoHandle gcm_{nullptr, nullptr};  // uses cipher_
};

}  // namespace netfold::auth
