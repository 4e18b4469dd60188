// The handshake of a plugin's connection: both ends prove by HMAC over fresh nonces that they know the secret of the
// listening process. NCCL carries that secret in the listener's handle, over its own bootstrap.
//
//   initiator  Hello                                      what the connection is for; a nonce
//   acceptor   nonce, proof
//   initiator  proof
//   acceptor   Answer                                     whether it takes the connection; an HMAC of that
//
// The proofs cover the hello, both nonces and the side that sends the proof. Where the security is more than none, both
// ends derive the secrets of both directions from the listener's secret and both nonces.
#pragma once

#include <netfold/auth/records.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

namespace netfold::nccl {

using Id = std::array<std::byte, 16>;

struct Hello {
  enum class Of : std::uint8_t {
    first,
    again,  // a connection that broke
    asks,   // the acceptor is to make it again; this connection carries nothing else
  };

  std::array<char, 8> magic = {'n', 'f', 'n', 'c', 'c', 'l', '0', '2'};
  Of of = Of::first;
  std::uint8_t rail = 0;
  std::uint8_t rails = 1;
  std::uint8_t security = 0;           // auth::Security
  std::uint32_t rma_min_bytes = 0;     // of the comm; 0: nothing goes by RMA
  std::uint32_t rank = 0;              // of a collective communicator's member; else 0
  std::uint16_t announces_always = 0;  // 1: the listening end may receive into memory of a GPU
  std::uint16_t reconnects = 0;        // asks: of the connection, as the initiator counts them
  std::uint64_t received = 0;          // bytes over the connections before
  Id listener{};
  Id comm{};
  auth::Secret nonce{};
};
static_assert(sizeof(Hello) == 96);

struct Agreed {
  std::uint64_t received = 0;  // by the other end
  auth::StreamSecrets secrets;
};

// Both run on a non-blocking socket until `deadline_ns`. They throw std::runtime_error where the other end does not know
// the secret, std::system_error where the connection breaks or the time is over.
//
// nullopt: the acceptor does not want this connection.
std::optional<Agreed> initiate(int fd, Hello hello, const auth::Secret& secret, std::int64_t deadline_ns);
// `decide`: called once the initiator has proved that it knows the secret. Returns the bytes received before; nullopt
// refuses the connection.
std::optional<Agreed> accept(int fd, Hello& hello, const auth::Secret& secret, std::int64_t deadline_ns,
                             const std::function<std::optional<std::uint64_t>(const Hello&)>& decide);

// Throws std::system_error.
void fill_random(std::span<std::byte> bytes);

}  // namespace netfold::nccl
