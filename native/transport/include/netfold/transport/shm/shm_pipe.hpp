// A pipe between two ranks of a node: a ring of bytes in shared memory each way.
//
// The ring to the peer stands in our segment, the peer's ring to us in its own. `written` is the writer's counter and
// `read` the reader's, each in its owner's segment, so every location has one writer. What is long goes in steps: the
// reader takes the first while the writer is at the next. A peer that sleeps is rung only for what it awaits; one that
// is awake finds the counter moved.
//
// Bytes in the ring outlive their writer: its memory stays mapped here. That the peer is gone shows only by its
// connection, over which nothing is said; it is looked at now and then, and after every sleep, which it ends. Only
// then, and with the ring empty, is the pipe closed.
#pragma once

#include <netfold/transport/pipe.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <memory>

namespace netfold::transport {

class ShmPipe final : public Pipe {
 public:
  // To the node's rank at `position`; `node` must outlive the pipe's last call. `connection`: a pipe to the same rank.
  ShmPipe(ShmNode& node, int position, std::unique_ptr<Pipe> connection);

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  // After ShmNode::prepare_sleep, and with its bell among the `fds`: the bell is what rings.
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override { return connection_->hung_up(); }
  // Nothing is lost by closing.
  std::size_t unconfirmed() const override { return 0; }

 private:
  // Small enough that both ends of a message of some 10 KB are at work at once.
  static constexpr std::size_t kStepBytes = 16 << 10;
  // Calls without an answer between two looks at the connection: a system call each.
  static constexpr int kQuietCalls = 256;

  // False: not all of it.
  bool write(const std::byte* from, std::size_t bytes);
  bool read(std::byte* into, std::size_t bytes);
  std::size_t room();
  std::size_t available();
  void publish_written();
  void publish_read();
  bool is_gone();

  ShmNode& node_;
  int position_;
  std::unique_ptr<Pipe> connection_;
  ShmNode::RingCursors& ours_;
  const ShmNode::RingCursors& theirs_;
  std::byte* out_;
  const std::byte* in_;
  std::uint64_t written_ = 0;
  std::uint64_t published_written_ = 0;
  std::uint64_t read_by_peer_ = 0;  // as last seen
  std::uint64_t read_ = 0;
  std::uint64_t published_read_ = 0;
  std::uint64_t written_by_peer_ = 0;  // as last seen
  mutable int quiet_calls_ = 0;
};

}  // namespace netfold::transport
