// A byte stream to one other rank, in both directions. Nothing here blocks and nothing knows what the bytes mean.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace netfold::transport {

class ResumableSocket;

class Pipe {
 public:
  struct Io {
    std::size_t bytes = 0;
    bool closed = false;               // the peer closed, or the connection broke
    int error = 0;                     // errno of a broken connection, 0 for an orderly close
    const std::string* why = nullptr;  // where more than that is known; the pipe's
    bool is_ours = false;              // what failed is on this side, and the peer may be well
  };

  // Memory that its owner, or an operation that borrowed it, says will stay as it is. Ends with the object.
  class RegistrationLease {
   public:
    virtual ~RegistrationLease() = default;
    // Whether the memory had to be made known to a fabric for it, or was: one of these is 1 once it was used.
    virtual std::uint32_t hits() const = 0;
    virtual std::uint32_t misses() const = 0;
  };

  // Memory to receive into that a fabric knows already. Its pipe has it back when the object ends.
  class Scratch {
   public:
    virtual ~Scratch() = default;
    virtual std::byte* data() const = 0;
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
  // done now; else what `wait_to_flush` adds wakes a sleeper that has something to do.
  virtual bool flush() { return true; }
  virtual void wait_to_flush(std::vector<pollfd>&) {}
  // Whether what was sent may need us further, as with a provider that moves data only while it is looked at: then
  // `flush` is to be called until it is through.
  virtual bool needs_progress() const { return false; }
  // Whether bytes that were taken from the caller have not left this process, and are lost if it closes the pipe.
  virtual bool has_unsent() const { return false; }
  // A piece that both ends know to be one may go from memory to memory: who reads says where to (`expect`), who sends
  // lends it, and waits for that word. Whether one of so many bytes does; the same at both ends.
  virtual bool uses_rma(std::size_t) const { return false; }
  // The place of the piece that the peer will lend under this name: it is to be read into just this memory, which is
  // the peer's until then. False: later.
  virtual bool post_receive(std::uint64_t, std::byte*, std::size_t) { return false; }
  // Whether the peer expects the piece of that name.
  virtual bool is_posted(std::uint64_t) { return false; }
  // As `send`, all of it or nothing; the last of `pieces` has that name, and is to be left alone until `lent` says so.
  virtual Io put(std::span<const iovec>, std::uint64_t) { return {}; }
  // Of the bytes taken, counted back from the last, how many are not the caller's again.
  virtual std::size_t bytes_in_flight() { return 0; }
  // Takes back what was lent and expected, as before a failure is told: true once nobody can read or write it. To be
  // called until then; where that takes too long, `force_close` makes it so at any price.
  virtual bool cancel() { return true; }
  virtual void force_close() {}
  // Whether there is no hope for a `cancel`.
  virtual bool must_force_close() { return false; }
  // For who lends or expects parts of it; null where that changes nothing.
  virtual std::unique_ptr<RegistrationLease> lease(std::byte*, std::size_t) { return nullptr; }
  // So many bytes at least; null where any memory is as good.
  virtual std::unique_ptr<Scratch> scratch(std::size_t) { return nullptr; }
  // Whether a message costs so much beside its bytes that few and long ones are better; the same at both ends.
  virtual bool prefers_large_chunks() const { return false; }
  // The connections under it, of a pipe that goes over any.
  virtual int rails() const { return 0; }
  virtual ResumableSocket* rail(int) { return nullptr; }
};

}  // namespace netfold::transport
