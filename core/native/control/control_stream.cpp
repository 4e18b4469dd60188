#include "control_stream.hpp"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <system_error>

namespace netfold::control {
namespace {

using transport::Address;
using transport::Fd;
using transport::now_ns;

constexpr std::size_t kLengthBytes = 4;
// As in netfold/switch_protocol/control_messages.py.
constexpr std::size_t kMaxMessageBytes = 1 << 16;
// Bytes that may wait for a peer that does not read.
constexpr std::size_t kMaxOutgoingBytes = 4 * kMaxMessageBytes;

void wait_for(int fd, short events, std::int64_t deadline_ns) {
  for (;;) {
    const std::int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) throw TimedOut();
    pollfd ready{fd, events, 0};
    const auto timeout = transport::timespec_of(left_ns);
    if (::ppoll(&ready, 1, &timeout, nullptr) > 0) return;
  }
}

// Connects, or returns the errno.
int connect_until(int fd, const addrinfo& to, std::int64_t deadline_ns) {
  if (::connect(fd, to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  try {
    wait_for(fd, POLLOUT, deadline_ns);
  } catch (const TimedOut&) {
    return ETIMEDOUT;
  }
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

std::string hexadecimal(std::span<const std::byte> bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte each : bytes) {
    text += kDigits[std::to_integer<unsigned>(each) >> 4];
    text += kDigits[std::to_integer<unsigned>(each) & 15];
  }
  return text;
}

Address address_of(const addrinfo& info) {
  Address address;
  std::memcpy(&address.storage, info.ai_addr, info.ai_addrlen);
  address.length = info.ai_addrlen;
  return address;
}

}  // namespace

ControlStream::ControlStream(const SwitchAddress& to, std::int64_t deadline_ns) {
  const addrinfo hints{.ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const int unknown = ::getaddrinfo(to.host.c_str(), std::to_string(to.port).c_str(), &hints, &found);
  if (unknown != 0) {
    throw ConnectError(": '" + to.host + "' is no host that is known here (" + ::gai_strerror(unknown) +
                       "); correct the name, or give the address");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, ::freeaddrinfo);
  int error = EADDRNOTAVAIL;
  Fd connected;
  for (const addrinfo* each = found; each != nullptr && error != 0; each = each->ai_next) {
    connected = Fd(::socket(each->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    error = connected ? connect_until(connected.get(), *each, deadline_ns) : errno;
    if (error == 0) peer_ = address_of(*each);
  }
  if (error == ECONNREFUSED) {
    throw ConnectError(" refused the connection: nothing listens there; start it with `netfold switch --listen " +
                       to.endpoint() + "`, or unset NETFOLD_SWITCH to use host algorithms");
  }
  if (error == ETIMEDOUT) throw Unanswered();
  if (error != 0) {
    throw ConnectError(std::string(" cannot be reached: ") + std::strerror(error) +
                       "; check the address and this host's routes");
  }
  // A small message behind the handshake would wait 40 ms for the peer's delayed acknowledgement.
  const int no_delay = 1;
  ::setsockopt(connected.get(), IPPROTO_TCP, TCP_NODELAY, &no_delay, sizeof no_delay);
  fd_ = transport::ProcessFd(std::move(connected));
  local_ = Address::local_of(fd_.get());
  if (!to.fingerprint.empty()) shake_hands(to.fingerprint, deadline_ns);
}

void ControlStream::shake_hands(const std::string& fingerprint, std::int64_t deadline_ns) {
  std::string found;
  try {
    tls_ = std::make_unique<TlsSession>();
    for (;;) {
      const bool done = tls_->shake_hands();
      flush_all(deadline_ns);
      if (done) break;
      wait(POLLIN, deadline_ns);
      std::array<std::byte, 1 << 14> bytes;
      const ssize_t count = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
      if (count == 0) throw Ended();
      if (count < 0 && !transport::is_temporary(errno)) transport::throw_errno("receiving");
      if (count > 0) tls_->feed(std::span(bytes).first(static_cast<std::size_t>(count)));
    }
    found = hexadecimal(tls_->fingerprint());
  } catch (const std::exception& error) {
    throw ConnectError(std::string(" did not shake hands (") + error.what() +
                       "): is it a netfold switch, started with --token-file? One that is open speaks no TLS and has "
                       "no fingerprint; check the address; for an open switch, leave #fingerprint out and unset "
                       "NETFOLD_TOKEN_FILE");
  }
  if (found != fingerprint) {
    throw ConnectError(" is not the one that NETFOLD_SWITCH names: its certificate's fingerprint is " + found +
                       ", not " + fingerprint +
                       ". Either it was started again without --state-dir, or somebody else answers there; nothing was "
                       "sent; if it is yours, set NETFOLD_SWITCH to what it says when it starts");
  }
}

void ControlStream::wait(short events, std::int64_t deadline_ns) const { wait_for(fd_.get(), events, deadline_ns); }

void ControlStream::enqueue(const Value& message) {
  std::vector<std::byte> bytes(kLengthBytes);
  const std::vector<std::byte> body = encode(message);
  if (body.size() > kMaxMessageBytes) throw ProtocolError("a message of " + std::to_string(body.size()) + " bytes");
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    bytes[i] = static_cast<std::byte>(body.size() >> (8 * (kLengthBytes - 1 - i)));
  }
  bytes.insert(bytes.end(), body.begin(), body.end());
  if (tls_) {
    tls_->write(bytes);
  } else {
    outgoing_.insert(outgoing_.end(), bytes.begin(), bytes.end());
  }
}

void ControlStream::collect_outgoing() {
  if (tls_) {
    const auto bytes = tls_->take_outgoing();
    outgoing_.insert(outgoing_.end(), bytes.begin(), bytes.end());
  }
  if (outgoing_.size() > kMaxOutgoingBytes) throw std::runtime_error("it does not read what it is sent");
}

bool ControlStream::flush() {
  collect_outgoing();
  std::size_t sent = 0;
  while (sent < outgoing_.size()) {
    const ssize_t count = ::send(fd_.get(), outgoing_.data() + sent, outgoing_.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count < 0) transport::throw_errno("sending");
    sent += static_cast<std::size_t>(count);
  }
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<std::ptrdiff_t>(sent));
  return outgoing_.empty();
}

void ControlStream::flush_all(std::int64_t deadline_ns) {
  while (!flush()) wait(POLLOUT, deadline_ns);
}

bool ControlStream::fill() {
  if (ended_) throw Ended();
  std::array<std::byte, 1 << 14> bytes;
  const ssize_t count = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
  if (count < 0 && transport::is_temporary(errno)) return false;
  if (count < 0) transport::throw_errno("receiving");
  if (count == 0) throw Ended();
  const auto came = std::span(bytes).first(static_cast<std::size_t>(count));
  if (tls_) {
    tls_->feed(came);
    ended_ = !tls_->read(received_);
    flush();  // messages of TLS itself
  } else {
    received_.insert(received_.end(), came.begin(), came.end());
  }
  return true;
}

std::optional<Value> ControlStream::first_message() {
  if (received_.size() < kLengthBytes) return std::nullopt;
  std::size_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length = length << 8 | std::to_integer<std::size_t>(received_[i]);
  if (length > kMaxMessageBytes) {
    throw ProtocolError("a message of " + std::to_string(length) + " bytes; the bound is " +
                        std::to_string(kMaxMessageBytes));
  }
  if (received_.size() < kLengthBytes + length) return std::nullopt;
  Value message = decode(std::span(received_).subspan(kLengthBytes, length));
  const Value* type = message.find("type");
  if (type == nullptr || !std::holds_alternative<std::string>(type->data)) throw ProtocolError("not a map with a type");
  received_.erase(received_.begin(), received_.begin() + static_cast<std::ptrdiff_t>(kLengthBytes + length));
  return message;
}

void ControlStream::send(const Value& message, std::int64_t deadline_ns) {
  enqueue(message);
  flush_all(deadline_ns);
}

void ControlStream::post(const Value& message) {
  enqueue(message);
  flush();
}

Value ControlStream::receive(std::int64_t deadline_ns) {
  for (;;) {
    if (auto message = first_message()) return std::move(*message);
    // Looked at before the bytes: what is here after a long pause still counts.
    const bool is_over = now_ns() >= deadline_ns;
    if (!fill()) {
      wait(POLLIN, deadline_ns);
    } else if (is_over) {
      if (auto message = first_message()) return std::move(*message);
      throw TimedOut();
    }
  }
}

std::optional<Value> ControlStream::try_receive() {
  constexpr int kMaxFills = 16;  // a peer that sends without an end must not hold the caller
  flush();
  for (int i = 0; i < kMaxFills; ++i) {
    if (auto message = first_message()) return message;
    if (!fill()) return std::nullopt;
  }
  return std::nullopt;
}

void ControlStream::shut_down() { ::shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace netfold::control
