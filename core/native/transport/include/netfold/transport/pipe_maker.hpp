// Makes the pipes of a mesh when they are first used, and knows what all of them have in common: what must be equal at
// both ends is known before there is a pipe.
#pragma once

#include <netfold/transport/pipe.hpp>

#include <memory>
#include <vector>

namespace netfold::transport {

class PipeMaker {
 public:
  virtual ~PipeMaker() = default;
  // The pipe to another rank, whose connection was not made yet. On the driver's thread.
  virtual std::unique_ptr<Pipe> make(int peer) = 0;

  // Whether the fixed cost of a message is so high that few long ones are better.
  virtual bool prefers_large_chunks() const { return false; }
  // Whether `Pipe::uses_rma` may be true of a pipe.
  virtual bool may_use_rma() const { return false; }
  // Whether sent bytes may need further calls, as with a provider that moves data only while it is polled. Then call
  // `Pipe::flush` until it returns true.
  virtual bool needs_progress() const { return false; }
  // A lease of memory for `Pipe::put` and `Pipe::post_receive` of every pipe; null where leases make no difference.
  virtual Pipe::RegistrationLease lease(std::byte*, std::size_t) { return nullptr; }

  // For pipes whose bytes no connection shows (Pipe::shows_bytes). Appends the ranks that may have sent bytes, or whose
  // pipes may have ended, since the last call. Read from such a rank until there is nothing.
  virtual void take_readable(std::vector<int>&) {}
  // Adds descriptors that wake a thread for which `take_readable` would find something.
  virtual void wait_for_readable(std::vector<pollfd>&) {}
};

}  // namespace netfold::transport
