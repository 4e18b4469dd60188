// The control connection to a switch: messages over TCP, inside TLS where the switch's fingerprint is known.
#pragma once

#include <netfold/control/msgpack.hpp>
#include <netfold/control/switch_address.hpp>
#include <netfold/transport/socket.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tls.hpp"

namespace netfold::control {

// A deadline passed.
struct TimedOut : std::runtime_error {
  TimedOut() : std::runtime_error("it did not answer in time") {}
};
// Nobody answered the request for a connection.
struct Unanswered : TimedOut {};
// The connection ended in order.
struct Ended : std::runtime_error {
  Ended() : std::runtime_error("the connection was closed") {}
};
// The peer cannot be reached, or is not the pinned one. The text is a clause after the switch's name.
struct ConnectError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Not thread-safe. All errors leave the stream unusable: TimedOut, Ended, ProtocolError,
// std::system_error, and std::runtime_error of TLS.
class ControlStream {
 public:
  // Connects and, where the address has a fingerprint, does the handshake and compares the fingerprint before any
  // message is sent. Throws ConnectError or Unanswered. A host name is resolved first, as long as the resolver takes.
  ControlStream(const SwitchAddress& to, std::int64_t deadline_ns);

  bool is_authenticated() const { return tls_ != nullptr; }
  const transport::Address& local() const { return local_; }
  const transport::Address& peer() const { return peer_; }

  // Blocks until the message has left, until the deadline.
  void send(const Value& message, std::int64_t deadline_ns);
  // Sends what can be sent without blocking, and keeps the rest for later calls of any function here.
  void post(const Value& message);
  Value receive(std::int64_t deadline_ns);
  // A message that is here as a whole; nullopt: none. Does not block.
  std::optional<Value> try_receive();
  void shut_down();

 private:
  void shake_hands(const std::string& fingerprint, std::int64_t deadline_ns);
  void enqueue(const Value& message);
  void collect_outgoing();
  // Whether all has left.
  bool flush();
  void flush_all(std::int64_t deadline_ns);
  // Receives once. False: nothing was there.
  bool fill();
  std::optional<Value> first_message();
  void wait(short events, std::int64_t deadline_ns) const;

  transport::ProcessFd fd_;
  transport::Address local_, peer_;
  std::unique_ptr<TlsSession> tls_;
  std::vector<std::byte> outgoing_;  // bytes for the socket
  std::vector<std::byte> received_;  // of messages
  bool ended_ = false;
};

}  // namespace netfold::control
