// A pipe between two ranks of a node: a ring of bytes in shared memory each way.
//
// The ring to the peer lies in this rank's segment, the ring from the peer in the peer's segment. `written` is the
// writer's counter and `read` the reader's. Each lies in its owner's segment, so every location has one writer. Long
// data go in steps of kStepBytes: the reader copies one step while the writer copies the next. The writer wakes a
// sleeping peer only for an event that the peer awaits; a peer that is awake sees the counter change.
//
// Bytes in the ring outlive their writer, since its memory stays mapped here. The end of the peer's process shows only by
// its connection, which carries no bytes. `hung_up` makes the connection. From then on it is checked after kQuietCalls
// calls without bytes, and after every sleep; its end also ends the sleep. The pipe is closed only once the connection
// has ended and the ring is empty.
#pragma once

#include <netfold/transport/pipe.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <memory>

namespace netfold::transport {

class ShmPipe final : public Pipe {
 public:
  // node: must outlive the pipe's last call.
  // position: of the peer in the node.
  // connection: a pipe to the same rank, whose end is the end of the peer.
  ShmPipe(ShmNode& node, int position, std::unique_ptr<Pipe> connection);

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  // Precondition: ShmNode::prepare_sleep was called, and the node's doorbell is among the `fds`; the doorbell wakes.
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override {
    is_hung_up_ = connection_->hung_up();
    return is_hung_up_;
  }
  bool was_connected() const override { return connection_->was_connected(); }
  bool shows_bytes() const override { return true; }
  int rails() const override { return connection_->rails(); }
  ResumableSocket* rail(int number) override { return connection_->rail(number); }
  // Closing loses no bytes: the ring stays readable.
  std::size_t unconfirmed() const override { return 0; }

 private:
  // Small enough that both ends of a message of some 10 KB copy at the same time.
  static constexpr std::size_t kStepBytes = 16 << 10;
  // Calls without bytes between two checks of the connection; each check is a system call.
  static constexpr int kQuietCalls = 256;

  // Copy through the ring. False where only a part fits, or is here.
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
  ShmNode::RingCursors& own_cursors_;
  const ShmNode::RingCursors& peer_cursors_;
  std::byte* out_;
  const std::byte* in_;
  std::uint64_t written_ = 0;
  std::uint64_t published_written_ = 0;
  std::uint64_t read_by_peer_ = 0;  // as last seen
  std::uint64_t read_ = 0;
  std::uint64_t published_read_ = 0;
  std::uint64_t written_by_peer_ = 0;  // as last seen
  mutable int quiet_calls_ = 0;
  bool is_hung_up_ = false;
};

}  // namespace netfold::transport
