// A byte stream to one other rank, in both directions. Nothing here blocks and nothing knows what the bytes mean.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace netfold::transport {

class Rail;

class Pipe {
 public:
  struct Io {
    std::size_t bytes = 0;
    bool closed = false;               // the peer closed, or the connection broke
    int error = 0;                     // errno of a broken connection, 0 for an orderly close
    const std::string* why = nullptr;  // where more than that is known; the pipe's
  };

  virtual ~Pipe() = default;
  // As many bytes as go now; 0 bytes and not closed means: later.
  virtual Io send(std::span<const iovec> pieces) = 0;
  virtual Io receive(std::span<const iovec> pieces) = 0;
  // Adds what wakes a sleeper once one of `events` (POLLIN, POLLOUT, POLLRDHUP) is there.
  virtual void wait_for(short events, std::vector<pollfd>& fds) const = 0;
  // Whether the peer has closed its end for good; what it said before may still be unread.
  virtual bool hung_up() = 0;
  // Bytes said to the peer that may be lost if we close and it still speaks.
  virtual std::size_t unconfirmed() const = 0;
  // Does what can be done for what was taken from callers before. True where nothing is left of that, or nothing can be
  // done now; else what `wait_to_catch_up` adds wakes a sleeper that has something to do.
  virtual bool catch_up() { return true; }
  virtual void wait_to_catch_up(std::vector<pollfd>&) {}
  // Whether what was sent may need us further, as with a provider that moves data only while it is looked at: then
  // `catch_up` is to be called until it is through.
  virtual bool needs_driving() const { return false; }
  // The connections under it, of a pipe that goes over any.
  virtual int rails() const { return 0; }
  virtual Rail* rail(int) { return nullptr; }
};

}  // namespace netfold::transport
