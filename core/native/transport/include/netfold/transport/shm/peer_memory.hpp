// Reads and writes the memory of another process of this machine directly, with one copy (process_vm_readv,
// process_vm_writev).
//
// The kernel allows this to a process that may trace the other: the same user, no fewer capabilities, a process that
// may be dumped, Yama's ptrace_scope 0, and a process id that is visible from here. `probe` tries a read instead of
// checking these conditions.
//
// A process id does not identify a process: the process may end and another may get the id, or it may become another
// program by exec. So every read also reads the owner's *mark*: random bytes at an address that the owner has
// announced. Both reads are one system call, and so of the same memory. With a wrong mark, the read does not count. A
// forked child has no copy of its parent's mark. A write cannot check the mark, so only a caller that has just read from
// the same rank may write: between the two, the process would have to be replaced by one of the same user with writable
// memory at the same addresses.
#pragma once

#include <sys/types.h>
#include <netfold/transport/mapping.hpp>

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

  // size: the ranks of the node; all must be probed before reads. Throws std::system_error.
  explicit PeerMemory(int size);
  // For a node of some of the ranks that `whole` has probed, by their positions there. This process's mark is the same,
  // and stays as long as either object lives.
  PeerMemory(const PeerMemory& whole, const std::vector<int>& positions);

  // This process's own mark, to be announced to the other ranks. It stays at its address while this object lives.
  const Mark& mark() const { return *static_cast<const Mark*>(static_cast<const void*>(page_->data())); }

  enum class ProbeResult : std::uint8_t {
    yes,
    refused,  // errno tells why
    another,  // the process with this id is not the one that announced the mark
  };
  // Tries to read the mark of the process at `position`. pid: its process id as seen from this process.
  ProbeResult probe(int position, pid_t pid, std::uint64_t mark_address, const Mark& mark);

  enum class Access : std::uint8_t {
    all,
    refused,  // some of the memory cannot be accessed now: it is not mapped, belongs to a device, or the rights are gone
    gone,     // the process has ended
  };
  // Copies from a rank that was probed. With any result, bytes of `to` may have been written.
  Access read(int position, std::byte* to, std::uint64_t from, std::size_t bytes);
  // Copies to a rank from which the caller has read within the last moments. With any result but `all`, a part may have
  // been written.
  Access write(int position, std::uint64_t to, const std::byte* from, std::size_t bytes);
  // Bytes copied by `read`. From any thread.
  std::uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    pid_t pid = 0;
    std::uint64_t mark_address = 0;
    Mark mark{};
  };
  std::shared_ptr<Mapping> page_;  // of the mark alone
  std::vector<Peer> peers_;
  std::atomic<std::uint64_t> bytes_read_ = 0;
};

}  // namespace netfold::transport
