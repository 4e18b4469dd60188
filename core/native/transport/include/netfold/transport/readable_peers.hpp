// The ranks of a mesh that may have sent bytes, for a receive from any rank. Found without a look at each rank:
//
//   connections      an epoll set, which reports each connection once when bytes come or its end
//   shared memory    the bits that writers set (ShmNode::take_written)
//   fabric streams   the list of those for which something came or that ended (Mesh::take_readable)
//
// Only a connection shows the end of its rank. So while a receive waits, connections that were not made are made: some
// at a time, and those to ranks in memory only after a longer wait. Connections that were closed because descriptors are
// short stay closed: their ranks are to be asked, some at a time.
#pragma once

#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <cstdint>
#include <vector>

namespace netfold::transport {

class ReadablePeers {
 public:
  // Borrows both; `node`: null where this rank shares no memory. Throws std::system_error.
  ReadablePeers(Mesh& mesh, ShmNode* node);

  // The connection to `peer` was made or is lost.
  void watch(int peer);
  // The connection to `peer` was closed since it was idle, and nothing of it is unread.
  void closed(int peer);
  // Appends the ranks that may have sent bytes since the last call. Such a rank is not reported again before it sends
  // more, so read from it until there is nothing.
  void take(std::vector<int>& peers);
  // No receive waited until now.
  void begin_wait() { began_ns_ = 0; }
  // Ranks whose connections are closed, in turn, at most kAskedAtOnce; none before a receive has waited for kAskNs, and
  // so long after the last ones.
  std::vector<int> to_ask(std::int64_t now_ns);
  // Adds what wakes a thread that would find something in `take`; makes some connections. Returns the time of the next
  // call; -1: none is due. Precondition: ShmNode::prepare_sleep was called.
  std::int64_t wait_for(std::vector<pollfd>& fds, std::int64_t now_ns);

  // The wait for a rank in memory after which the connection to it is made. Most waits are shorter.
  static constexpr std::int64_t kConnectNs = 1'000'000'000;
  static constexpr std::int64_t kAskNs = 1'000'000'000;
  static constexpr std::size_t kAskedAtOnce = 16;

 private:
  static constexpr int kConnectsAtOnce = 8;
  static constexpr std::int64_t kConnectPauseNs = 100'000'000;

  std::int64_t connect_some(std::int64_t now_ns);
  bool is_closed(int peer);

  Mesh& mesh_;
  ShmNode* node_;
  Fd epoll_;
  bool is_watching_ = false;     // any connection
  std::vector<bool> in_memory_;  // by rank
  std::vector<int> marked_;      // to be reported by the next `take`
  std::vector<int> closed_;      // the next to be asked first
  int looked_at_ = 0;            // first at the ranks of other hosts, then at those in memory: up to twice all of them
  std::int64_t next_look_ns_ = 0;
  std::int64_t next_ask_ns_ = 0;
  std::int64_t began_ns_ = 0;  // the wait; 0: it did not sleep yet
};

}  // namespace netfold::transport
