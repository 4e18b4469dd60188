// Tags packets and checks them: AES-128-GMAC, which is AES-GCM with nothing to encrypt (NIST SP 800-38D); or encrypts
// what is behind their headers, by AES-128-GCM with the header as additional data.
//
// The arithmetic is OpenSSL's libcrypto, opened at run time: building needs no headers of it, and a host without it
// runs everything but packets that are authenticated. Keys come from above, finished.
//
// What must always hold: a nonce stands for one packet's bytes under a key, whoever tags them. Two different packets
// with one nonce give the key away.
//
//   .venv/bin/python -m pytest tests/native/test_packet_authenticator.py
#pragma once

#include <sys/uio.h>
#include <netfold/auth/records.hpp>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace netfold::auth {

inline constexpr std::size_t kKeyBytes = 16;
inline constexpr std::size_t kNonceBytes = 12;
inline constexpr std::size_t kMacBytes = 16;

using Key = std::array<std::byte, kKeyBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

// Why no PacketAuthenticator can be made on this host; empty where one can.
const std::string& unavailable_reason();

// One key, scheduled once, for packets that are all authenticated or all encrypted. Not for two threads at a time.
// Allocates only when it is made.
class PacketAuthenticator {
 public:
  // Throws std::runtime_error with unavailable_reason().
  explicit PacketAuthenticator(const Key& key, Security security = Security::authenticate);

  bool encrypts() const { return security_ == Security::encrypt; }

  // Writes the tag of the pieces, as if they stood one behind the other, to out[0, kMacBytes).
  void mac(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out);
  // Whether the last kMacBytes of `tagged` are the tag of what is before them; takes as long for any wrong one.
  // Precondition: there are as many.
  bool verify(const Nonce& nonce, std::span<const std::byte> tagged);

  // Of a packet with this header: encrypts the pieces, as if they stood one behind the other, to `out`, which may be
  // the only piece, and writes the tag. Precondition: encrypts().
  void encrypt(const Nonce& nonce, std::span<const std::byte> header, std::span<const iovec> pieces, std::byte* out,
               std::byte* tag);
  // Decrypts `sealed`, a packet with its tag, behind its first `header_bytes`; the packet goes to `out`, without the
  // tag. False where the tag is wrong: what is at `out` means nothing then. Preconditions: encrypts(); it is as long.
  bool decrypt(const Nonce& nonce, std::span<const std::byte> sealed, std::size_t header_bytes, std::byte* out);

 private:
  struct FreeCipher {
    void operator()(void* cipher) const;
  };
  struct FreeGcm {
    void operator()(void* gcm) const;
  };
  Security security_;
  std::unique_ptr<void, FreeCipher> cipher_;
  std::unique_ptr<void, FreeGcm> gcm_;  // uses cipher_
};

}  // namespace netfold::auth
