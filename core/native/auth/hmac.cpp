#include <netfold/auth/hmac.hpp>

#include "libcrypto.hpp"

namespace netfold::auth {

Secret hmac(std::span<const std::byte> key, std::span<const std::byte> data) {
  Secret out;
  unsigned bytes = 0;
  const auto* done = crypto().hmac(crypto().sha_256(), key.data(), static_cast<int>(key.size()), bytes_of(data.data()),
                                   data.size(), bytes_of(out.data()), &bytes);
  check(done != nullptr && bytes == out.size(), "compute an HMAC");
  return out;
}

bool equal(std::span<const std::byte, kSecretBytes> a, std::span<const std::byte, kSecretBytes> b) {
  return crypto().compare(a.data(), b.data(), kSecretBytes) == 0;
}

}  // namespace netfold::auth
