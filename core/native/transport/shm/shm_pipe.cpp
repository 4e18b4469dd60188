#include <netfold/transport/shm/shm_pipe.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::transport {
namespace {

constexpr std::size_t kRingBytes = ShmNode::kRingBytes;
static_assert((kRingBytes & (kRingBytes - 1)) == 0);

// The contiguous bytes from `at` to the end of the ring.
std::size_t contiguous(std::uint64_t at) { return kRingBytes - (at & (kRingBytes - 1)); }

}  // namespace

ShmPipe::ShmPipe(ShmNode& node, int position, std::unique_ptr<Pipe> connection)
    : node_(node),
      position_(position),
      connection_(std::move(connection)),
      own_cursors_(node.cursors(node.self(), position)),
      peer_cursors_(node.cursors(position, node.self())),
      out_(node.ring(node.self(), position)),
      in_(node.ring(position, node.self())) {}

Pipe::Io ShmPipe::send(std::span<const iovec> pieces) {
  if (written_ != read_by_peer_ && is_gone()) return {.closed = true};
  const std::uint64_t begin = written_;
  for (const iovec& piece : pieces) {
    if (!write(static_cast<const std::byte*>(piece.iov_base), piece.iov_len)) break;
  }
  publish_written();
  return {.bytes = static_cast<std::size_t>(written_ - begin)};
}

Pipe::Io ShmPipe::receive(std::span<const iovec> pieces) {
  // The peer wrote its last bytes before its connection ended: check the ring once more.
  if (available() == 0 && is_gone() && available() == 0) return {.closed = true};
  const std::uint64_t begin = read_;
  for (const iovec& piece : pieces) {
    if (!read(static_cast<std::byte*>(piece.iov_base), piece.iov_len)) break;
  }
  publish_read();
  return {.bytes = static_cast<std::size_t>(read_ - begin)};
}

bool ShmPipe::write(const std::byte* from, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t some = std::min({bytes, room(), contiguous(written_), kStepBytes});
    if (some == 0) return false;
    std::memcpy(out_ + (written_ & (kRingBytes - 1)), from, some);
    written_ += some;
    from += some;
    bytes -= some;
    if (written_ - published_written_ >= kStepBytes) publish_written();
  }
  return true;
}

bool ShmPipe::read(std::byte* into, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t some = std::min({bytes, available(), contiguous(read_), kStepBytes});
    if (some == 0) return false;
    std::memcpy(into, in_ + (read_ & (kRingBytes - 1)), some);
    read_ += some;
    into += some;
    bytes -= some;
    if (read_ - published_read_ >= kStepBytes) publish_read();
  }
  return true;
}

std::size_t ShmPipe::room() {
  if (written_ - read_by_peer_ == kRingBytes) read_by_peer_ = peer_cursors_.read.load(std::memory_order_acquire);
  return kRingBytes - (written_ - read_by_peer_);
}

std::size_t ShmPipe::available() {
  if (written_by_peer_ == read_) written_by_peer_ = peer_cursors_.written.load(std::memory_order_acquire);
  return written_by_peer_ - read_;
}

void ShmPipe::publish_written() {
  if (published_written_ == written_) return;
  published_written_ = written_;
  own_cursors_.written.store(written_, std::memory_order_release);
  node_.ring_doorbell(position_, POLLIN);
}

void ShmPipe::publish_read() {
  if (published_read_ == read_) return;
  published_read_ = read_;
  own_cursors_.read.store(read_, std::memory_order_release);
  node_.ring_doorbell(position_, POLLOUT);
}

bool ShmPipe::is_gone() {
  if (is_hung_up_) return true;
  if (++quiet_calls_ < kQuietCalls) return false;
  quiet_calls_ = 0;
  return connection_->was_connected() && hung_up();
}

void ShmPipe::wait_for(short events, std::vector<pollfd>& fds) const {
  node_.await(position_, events);
  quiet_calls_ = kQuietCalls;
  if (connection_->was_connected()) connection_->wait_for(POLLRDHUP, fds);
}

}  // namespace netfold::transport
