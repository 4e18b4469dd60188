// Reading what stands in another process of this machine: straight from its buffer into ours, once (process_vm_readv).
//
// The kernel grants it to who may trace that process: the same user, no fewer capabilities, a process that may be
// dumped, Yama's ptrace_scope 0; and it must be visible from here. What of that holds is not asked but tried, by
// `probe`.
//
// A number says little about a process: it may end, and another get its number; or become another program. So every
// read takes the owner's *mark* too, random bytes at an address that it has told before, in the same system call and so
// from the same memory: without the mark, nothing was read. A forked child has no mark of its parent's.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace netfold::transport {

class PeerMemory : public std::enable_shared_from_this<PeerMemory> {
 public:
  using Mark = std::array<std::byte, 16>;

  // For a node of so many ranks, none of them met. Throws std::system_error.
  explicit PeerMemory(int size);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // This process's own mark, to be told to the others; it stands there for as long as this lives.
  const Mark& mark() const { return *mark_; }

  enum class ProbeResult : std::uint8_t {
    yes,
    refused,  // errno says why
    another,  // the process of that number is not the one that told us
  };
  // Tries to read the mark of the process that is at `position`, `pid` being its number as it is seen here.
  ProbeResult probe(int position, pid_t pid, std::uint64_t mark_address, const Mark& mark);

  enum class Read : std::uint8_t {
    all,
    refused,  // some of it cannot be read, at least not now: it is not mapped, a device's, or the rights are gone
    gone,     // that process has ended
  };
  // Copies from a rank that was met. Whatever it says, bytes of `to` may have been written.
  Read read(int position, std::byte* to, std::uint64_t from, std::size_t bytes);
  // By `read`, so far. From any thread.
  std::uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    pid_t pid = 0;
    std::uint64_t mark_address = 0;
    Mark mark{};
  };
  Mark* mark_;  // alone in its page
  std::vector<Peer> peers_;
  std::atomic<std::uint64_t> bytes_read_ = 0;
};

}  // namespace netfold::transport
