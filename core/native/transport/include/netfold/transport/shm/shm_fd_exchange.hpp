// Wakes the ranks of a node, and lets them map each other's regions: messages between any two ranks of the node, over
// one datagram socket a rank, whose name only the ranks of the group can derive. A message may carry a descriptor, and
// each carries the node's token; a message without the token changes nothing.
//
// A rank wakes another rank by a message at first. The woken rank replies with its event (eventfd), which wakes it
// faster from then on. So a rank has descriptors for the ranks that it wakes, at most kPeerEvents, and none for the
// others.
//
// A rank offers a region to the peers that will read it before a post refers to it, so the descriptor has arrived when
// a peer reads the post. Once its owner has removed a region, a peer unmaps it when it reads its messages again.
#pragma once

#include <sys/un.h>
#include <netfold/transport/shm/shm_registry.hpp>

#include <array>
#include <atomic>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace netfold::transport {

class ShmFdExchange {
 public:
  using Token = std::array<std::byte, 16>;

  // socket: a non-blocking datagram socket, bound to the abstract address `name` + this rank. A child made by fork does
  //   not have it.
  // token: the same on all ranks of the node, and known to no other process.
  // self: this rank's position.
  ShmFdExchange(Fd socket, std::string name, const Token& token, int self);

  // Adds the peer at the next position, and this rank itself at its own.
  // sent, came: counters in shared memory of the messages about regions to and from the peer. For a region, the socket
  //   is read only after `came` has changed.
  void add(int rank, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came);

  // Makes the peer's descriptors ready, so that its sleep ends.
  void ring(int position);
  // Ready while this rank is rung or a message is unread.
  std::array<int, 2> descriptors() const { return {event_.get(), socket_.get()}; }
  // Ends being rung: resets the event, or reads the messages.
  void clear();

  // Sends the region to `position`, unless that was done before. False where no more messages fit: continue without it.
  bool offer(int position, const ShmRegion& region);
  // Maps and unmaps what peers have sent, and tells peers which regions this rank has removed. Runs in every call with
  // long tensors: a descriptor that waits in a socket keeps memory alive that its owner has freed.
  void exchange();
  // The address where a part of the peer's region is mapped here; nullptr where the region was never offered
  // or cannot be mapped.
  std::byte* mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes);

 private:
  // Most events of other ranks that this rank holds. Further ranks are woken by messages.
  static constexpr int kPeerEvents = 64;
  // Most messages that `clear` reads. What is left makes the next sleep end at once.
  static constexpr int kMessages = 64;
  // 0 is the node's memory, which bootstrap/shm_discovery.py sends and receives.
  enum class Operation : std::uint32_t { ring = 1, event = 2, map = 3, unmap = 4 };
  struct Message {
    Token token;
    Operation operation;
    std::int32_t sender;  // position
    std::uint64_t id;     // of a region
    std::uint64_t bytes;
  };
  static_assert(sizeof(Message) == 40);
  struct Peer {
    sockaddr_un address{};
    socklen_t address_bytes = 0;
    Fd event;                    // of the peer, once it has been received
    bool has_own_event = false;  // this rank has sent its event
    std::atomic<std::uint32_t>* sent = nullptr;
    const std::atomic<std::uint32_t>* came = nullptr;
    std::uint32_t read = 0;                   // of `came`
    std::set<std::uint64_t> offered;          // ids of this rank's regions that the peer was sent
    std::map<std::uint64_t, Mapping> mapped;  // the peer's regions
  };
  Peer& at(int position) { return peers_[static_cast<std::size_t>(position)]; }
  bool send(const Peer& peer, Operation operation, int fd, std::uint64_t id = 0, std::uint64_t bytes = 0) {
    return send(socket_.get(), peer, operation, fd, id, bytes);
  }
  bool send(int socket, const Peer& peer, Operation operation, int fd, std::uint64_t id, std::uint64_t bytes);
  bool send_counted(Peer& peer, Operation operation, int fd, std::uint64_t id, std::uint64_t bytes);
  void announce_removed();
  // Reads messages until all that the peer has counted are read.
  void read_from(const Peer& peer);
  // False: no message was there.
  bool read_message();
  void handle(const Message& message, Fd fd);

  ProcessFd socket_;
  Fd event_;
  std::string name_;
  Token token_;
  int self_;
  int peer_events_ = 0;
  std::vector<Peer> peers_;
  std::uint64_t removals_announced_;
};

}  // namespace netfold::transport
