#include "packet_keys.hpp"

#include <netfold/auth/hmac.hpp>
#include <netfold/control/msgpack.hpp>

#include <algorithm>
#include <string_view>
#include <vector>

namespace netfold::control {
namespace {

auth::Key derived(std::span<const std::byte> secret, std::string_view kind, std::uint32_t job, std::uint32_t epoch,
                  std::uint16_t worker) {
  if (secret.size() != auth::kSecretBytes) throw ProtocolError("it gave a secret of another length");
  std::vector<std::byte> info;
  const auto append_text = [&](std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text));
    info.insert(info.end(), bytes.begin(), bytes.end());
  };
  const auto append = [&](std::uint32_t value, int bytes) {
    for (int i = bytes; i-- > 0;) info.push_back(static_cast<std::byte>(value >> (8 * i)));
  };
  append_text("netfold packets 1 ");
  append_text(kind);
  append(job, 4);
  append(epoch, 4);
  append(worker, 2);
  append(1, 1);  // the first block of output, which is longer than the key
  constexpr auth::Secret kNoSalt{};
  const auth::Secret block = auth::hmac(auth::hmac(kNoSalt, secret), info);
  auth::Key key;
  std::copy_n(block.begin(), key.size(), key.begin());
  return key;
}

}  // namespace

auth::Key hello_key(std::span<const std::byte> secret, std::uint32_t job, std::uint16_t worker) {
  return derived(secret, "hellos", job, 0, worker);
}

auth::Key contribution_key(std::span<const std::byte> secret, std::uint32_t job, std::uint32_t epoch,
                           std::uint16_t worker) {
  return derived(secret, "contributions", job, epoch, worker);
}

auth::Key result_key(std::span<const std::byte> secret, std::uint32_t job, std::uint32_t epoch) {
  return derived(secret, "answers", job, epoch, 0);
}

}  // namespace netfold::control
