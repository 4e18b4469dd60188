// Lets the ranks of a node map each other's regions: sends descriptors over a socket to each rank, and maps the
// descriptors that arrive.
//
// A rank offers a region to the peers that will read it before a post refers to it, so the descriptor has arrived when
// a peer reads the post. Once its owner has removed a region, a peer unmaps it in the next call that refers to memory,
// or at the end.
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

  // Adds the peer at the next position.
  // link: a connected local stream socket to the peer, owned from here on; empty at this rank's own position.
  // sent, came: counters in shared memory of the control messages to and from the peer. The socket is read only after
  //   `came` has changed.
  void add(Fd link, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came);

  // Sends the region to `position`, unless that was done before. False where the socket is full: continue without it.
  bool offer(int position, const ShmRegion& region);
  // Maps and unmaps what peers have sent, and tells peers which regions this rank has removed. Runs in every call with
  // long tensors: a descriptor that waits in a socket keeps memory alive that its owner has freed.
  void exchange();
  // The address where a part of the peer's region is mapped here; nullptr where the region was never offered
  // or cannot be mapped.
  std::byte* mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes);

 private:
  enum class Operation : std::uint32_t { map = 1, unmap = 2 };
  struct ControlMessage {
    Operation operation;
    std::uint32_t reserved;
    std::uint64_t id;
    std::uint64_t bytes;
  };
  struct Peer {
    Fd link;
    std::atomic<std::uint32_t>* sent;
    const std::atomic<std::uint32_t>* came;
    std::uint32_t read = 0;                   // of `came`
    std::set<std::uint64_t> offered;          // ids of this rank's regions that the peer was sent
    std::map<std::uint64_t, Mapping> mapped;  // the peer's regions
  };
  static bool send(Peer& peer, const ControlMessage& control_message, int fd);
  void announce_removed();
  static void read_control_messages(Peer& peer);

  std::vector<Peer> peers_;
  std::uint64_t removals_announced_ = 0;
};

}  // namespace netfold::transport
