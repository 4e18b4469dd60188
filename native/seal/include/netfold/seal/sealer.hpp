// Tags packets and checks them: AES-128-GMAC, which is AES-GCM with nothing to encrypt (NIST SP 800-38D).
//
// The arithmetic is OpenSSL's libcrypto, opened at run time: building needs no headers of it, and a host without it
// runs everything but packets that are authenticated. Keys come from above, finished.
//
// What must always hold: a nonce stands for one packet's bytes under a key, whoever tags them. Two different packets
// with one nonce give the key away.
//
//   .venv/bin/python -m pytest tests/native/test_seal.py
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace netfold::seal {

inline constexpr std::size_t kKeyBytes = 16;
inline constexpr std::size_t kNonceBytes = 12;
inline constexpr std::size_t kTagBytes = 16;

using Key = std::array<std::byte, kKeyBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

// Why no Sealer can be made on this host; empty where one can.
const std::string& missing();

// One key, scheduled once. Not for two threads at a time. Allocates only when it is made.
class Sealer {
 public:
  // Throws std::runtime_error with missing().
  explicit Sealer(const Key& key);

  // Writes the tag of the pieces, as if they stood one behind the other, to out[0, kTagBytes).
  void tag(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out);
  // Whether the last kTagBytes of `tagged` are the tag of what is before them; takes as long for any wrong one.
  // Precondition: there are as many.
  bool matches(const Nonce& nonce, std::span<const std::byte> tagged);

 private:
  struct FreeCipher {
    void operator()(void* cipher) const;
  };
  struct FreeGcm {
    void operator()(void* gcm) const;
  };
  std::unique_ptr<void, FreeCipher> cipher_;
  std::unique_ptr<void, FreeGcm> gcm_;  // uses cipher_
};

}  // namespace netfold::seal
