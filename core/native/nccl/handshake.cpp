#include "handshake.hpp"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <netfold/auth/hmac.hpp>
#include <netfold/transport/socket.hpp>

#include <cerrno>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

namespace netfold::nccl {
namespace {

using auth::Secret;
using transport::now_ns;

enum class Side : char { initiator = 'i', acceptor = 'a' };

struct Challenge {
  Secret nonce{};
  Secret proof{};
};

struct Answer {
  std::uint64_t is_taken = 0;
  std::uint64_t received = 0;
  Secret proof{};
};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

// HMAC over a label, the hello, the acceptor's nonce and further bytes.
Secret digest(const Secret& secret, std::string_view label, const Hello& hello, const Secret& nonce,
              std::span<const std::byte> more = {}) {
  std::vector<std::byte> said;
  append(said, std::as_bytes(std::span(label)));
  append(said, bytes_of(hello));
  append(said, nonce);
  append(said, more);
  return auth::hmac(secret, said);
}

Secret proof_of(Side side, const Secret& secret, const Hello& hello, const Secret& nonce) {
  return digest(secret, side == Side::initiator ? "netfold nccl initiator" : "netfold nccl acceptor", hello, nonce);
}

auth::StreamSecrets secrets_of(Side own, const Secret& secret, const Hello& hello, const Secret& nonce) {
  const auto security = static_cast<auth::Security>(hello.security);
  if (security == auth::Security::none) return {};
  const Secret from_initiator = digest(secret, "netfold nccl from initiator", hello, nonce);
  const Secret from_acceptor = digest(secret, "netfold nccl from acceptor", hello, nonce);
  return {.security = security,
          .send = own == Side::initiator ? from_initiator : from_acceptor,
          .receive = own == Side::initiator ? from_acceptor : from_initiator};
}

void wait(int fd, short events, std::int64_t deadline_ns) {
  const std::int64_t left_ms = (deadline_ns - now_ns() + 999'999) / 1'000'000;
  pollfd ready{fd, events, 0};
  if (left_ms <= 0 || ::poll(&ready, 1, static_cast<int>(left_ms)) == 0) {
    throw std::system_error(ETIMEDOUT, std::generic_category(), "the other end did not answer");
  }
}

template <class T>
void send(int fd, const T& value, std::int64_t deadline_ns) {
  auto left = bytes_of(value);
  while (!left.empty()) {
    const ssize_t sent = ::send(fd, left.data(), left.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && !transport::is_temporary(errno)) transport::throw_errno("send");
    if (sent > 0) left = left.subspan(static_cast<std::size_t>(sent));
    if (!left.empty()) wait(fd, POLLOUT, deadline_ns);
  }
}

// Never reads beyond the value: the bytes behind it are for the stream.
template <class T>
T receive(int fd, std::int64_t deadline_ns) {
  T value;
  auto left = std::as_writable_bytes(std::span(&value, 1));
  while (!left.empty()) {
    const ssize_t came = ::recv(fd, left.data(), left.size(), MSG_DONTWAIT);
    if (came == 0) throw std::system_error(ECONNRESET, std::generic_category(), "the other end closed the connection");
    if (came < 0 && !transport::is_temporary(errno)) transport::throw_errno("receive");
    if (came > 0) left = left.subspan(static_cast<std::size_t>(came));
    if (!left.empty() && came < 0) wait(fd, POLLIN, deadline_ns);
  }
  return value;
}

void require_proof(const Secret& given, const Secret& wanted) {
  if (!auth::equal(given, wanted)) throw std::runtime_error("the other end does not know the listener's secret");
}

}  // namespace

std::optional<Agreed> initiate(int fd, Hello hello, const Secret& secret, std::int64_t deadline_ns) {
  fill_random(hello.nonce);
  send(fd, hello, deadline_ns);
  const auto challenge = receive<Challenge>(fd, deadline_ns);
  require_proof(challenge.proof, proof_of(Side::acceptor, secret, hello, challenge.nonce));
  send(fd, proof_of(Side::initiator, secret, hello, challenge.nonce), deadline_ns);
  auto answer = receive<Answer>(fd, deadline_ns);
  const Secret proof = std::exchange(answer.proof, Secret{});
  require_proof(proof, digest(secret, "netfold nccl answer", hello, challenge.nonce, bytes_of(answer)));
  if (answer.is_taken == 0) return std::nullopt;
  return Agreed{answer.received, secrets_of(Side::initiator, secret, hello, challenge.nonce)};
}

std::optional<Agreed> accept(int fd, Hello& hello, const Secret& secret, std::int64_t deadline_ns,
                             const std::function<std::optional<std::uint64_t>(const Hello&)>& decide) {
  hello = receive<Hello>(fd, deadline_ns);
  if (hello.magic != Hello().magic || hello.security > static_cast<std::uint8_t>(auth::Security::encrypt)) {
    throw std::runtime_error("the first bytes are not a hello of this version of the plugin");
  }
  Challenge challenge;
  fill_random(challenge.nonce);
  challenge.proof = proof_of(Side::acceptor, secret, hello, challenge.nonce);
  send(fd, challenge, deadline_ns);
  require_proof(receive<Secret>(fd, deadline_ns), proof_of(Side::initiator, secret, hello, challenge.nonce));
  const auto received = decide(hello);
  Answer answer{.is_taken = received.has_value(), .received = received.value_or(0)};
  answer.proof = digest(secret, "netfold nccl answer", hello, challenge.nonce, bytes_of(answer));
  send(fd, answer, deadline_ns);
  if (!received) return std::nullopt;
  return Agreed{hello.received, secrets_of(Side::acceptor, secret, hello, challenge.nonce)};
}

void fill_random(std::span<std::byte> bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    transport::throw_errno("getrandom");
  }
}

}  // namespace netfold::nccl
