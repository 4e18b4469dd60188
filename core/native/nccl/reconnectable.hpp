// Connections between this process and another one that can be made again after they broke, by number (`rail`).
//
// The end that made them makes them again. The other end asks it to where it may not have noticed the break, if it knows
// its address (endpoint.hpp).
#pragma once

#include <netfold/transport/socket.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "handshake.hpp"

namespace netfold::nccl {

class Reconnectable {
 public:
  // A connection that waits for a socket.
  struct Broken {
    std::uint64_t received = 0;  // bytes
    int reconnects = 0;          // of this end: the other end may not have learnt of the last one
    std::int64_t since_ns = 0;
  };
  static constexpr int kAny = -2;

  virtual ~Reconnectable() = default;
  virtual const Id& id() const = 0;  // of both ends
  virtual bool has_dialled() const = 0;
  // As messages name the other end.
  virtual const std::string& peer() const = 0;
  virtual int rails() const = 0;

  // All may be called by any thread.
  // Whether it has failed, so that no connection is to be made again.
  virtual bool is_over() = 0;
  virtual std::optional<Broken> broken(int rail) = 0;
  // The same, after giving up the socket of a connection that is up and was reconnected at most `reconnects` times: the
  // other end has given it up. Throws std::runtime_error where it is too early to say.
  virtual std::optional<Broken> disconnect(int rail, int reconnects) = 0;
  // False: it was reconnected meanwhile.
  virtual bool reconnect(int rail, int reconnects, transport::Fd socket, const Agreed& agreed) = 0;
  virtual void give_up(int rail, int reconnects, const std::string& why) = 0;
  // Finds connections that the other end has left, which no call may touch.
  virtual void look() = 0;
  // Whether everything that was sent has arrived at the other end's host, or cannot.
  virtual bool has_arrived() = 0;

 protected:
  Reconnectable() = default;
  Reconnectable(const Reconnectable&) = delete;
  Reconnectable& operator=(const Reconnectable&) = delete;
};

}  // namespace netfold::nccl
