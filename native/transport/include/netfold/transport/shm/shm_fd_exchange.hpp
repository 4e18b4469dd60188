// How ranks of a node come to map each other's regions: descriptors are passed over a socket to each, and what has
// come is mapped.
//
// A region is offered to the peers that will read it before a post refers to it, so its descriptor is there when the
// post is read. What its owner has let go of is let go of here in the next call that refers to memory, or at the end.
#pragma once

#include <netfold/transport/shm/shm_registry.hpp>

#include <atomic>
#include <map>
#include <set>
#include <vector>

namespace netfold::transport {

class ShmFdExchange {
 public:
  ShmFdExchange();
  ~ShmFdExchange();
  ShmFdExchange(const ShmFdExchange&) = delete;
  ShmFdExchange& operator=(const ShmFdExchange&) = delete;

  // Of the next position: a connected local stream socket to it, which becomes ours; empty at our own place. `sent` and
  // `came`, in shared memory, count letters to it and from it: without a new one nobody asks the socket.
  void add(Fd link, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came);

  // Makes sure that `position` has been sent the region. False where the socket has no room now: then do without.
  bool offer(int position, const ShmRegion& region);
  // Maps and unmaps what peers have sent, and tells peers which regions this rank has freed. Runs in every call with
  // long tensors: a descriptor that waits in a socket keeps memory that its owner has freed.
  void exchange();
  // Where the peer's region stands in our memory; nullptr when it was never offered, or cannot be mapped.
  std::byte* mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes);

 private:
  enum class Operation : std::uint32_t { map = 1, unmap = 2 };
  struct ControlMessage {
    Operation operation;
    std::uint32_t reserved;
    std::uint64_t id;
    std::uint64_t bytes;
  };
  struct Mapping {
    std::byte* address = nullptr;
    std::size_t bytes = 0;
  };
  struct Peer {
    Fd link;
    std::atomic<std::uint32_t>* sent;
    const std::atomic<std::uint32_t>* came;
    std::uint32_t read = 0;                   // of `came`
    std::set<std::uint64_t> offered;          // what we sent
    std::map<std::uint64_t, Mapping> mapped;  // what came
  };
  static bool send(Peer& peer, const ControlMessage& message_out, int fd);
  void announce_removed();
  static void read_control_messages(Peer& peer);

  std::vector<Peer> peers_;
  std::uint64_t removals_seen_ = 0;
};

}  // namespace netfold::transport
