#include <netfold/transport/tcp/tcp_pipe.hpp>

#include <algorithm>

namespace netfold::transport {

TcpPipe::TcpPipe(std::vector<Fd> sockets, const std::vector<auth::StreamSecrets>& secrets, bool resumable,
                 std::function<void(int rail, bool is_first)> on_broken)
    : reported_(sockets.size(), kNone), on_broken_(std::move(on_broken)) {
  rails_.reserve(sockets.size());
  for (std::size_t rail = 0; rail < sockets.size(); ++rail) {
    rails_.emplace_back(std::move(sockets[rail]), resumable, secrets.at(rail));
  }
}

Pipe::Io TcpPipe::send(std::span<const iovec> pieces) {
  return by_stripes(pieces, sent_, [](ResumableSocket& rail, std::span<const iovec> part) { return rail.send(part); });
}

Pipe::Io TcpPipe::receive(std::span<const iovec> pieces) {
  return by_stripes(pieces, received_,
                    [](ResumableSocket& rail, std::span<const iovec> part) { return rail.receive(part); });
}

// Moves stripe after stripe, until a rail moves only part of its stripe.
template <class Move>
Pipe::Io TcpPipe::by_stripes(std::span<const iovec> pieces, std::uint64_t& position, Move move) {
  if (rails_.size() == 1) {
    const Io io = move(rails_[0], pieces);
    if (io.bytes == 0) report_broken(0);
    return io;
  }
  Io total;
  IovecCursor left(pieces);
  while (!left.at_end()) {
    IovecCursor::Parts parts;
    left.take(parts, kStripeBytes - position % kStripeBytes);
    const std::size_t rail = rail_at(position);
    const Io io = move(rails_[rail], parts.span());
    position += io.bytes;
    total.bytes += io.bytes;
    if (io.bytes < parts.bytes) {
      report_broken(rail);
      // Report the bytes first; the next call returns the rail's error again.
      return total.bytes > 0 ? total : io;
    }
  }
  return total;
}

void TcpPipe::report_broken(std::size_t rail) {
  if (!rails_[rail].is_broken() || reported_[rail] == rails_[rail].reconnects()) return;
  reported_[rail] = rails_[rail].reconnects();
  on_broken_(static_cast<int>(rail), rails_[rail].is_unused());
}

void TcpPipe::wait_for(short events, std::vector<pollfd>& fds) const {
  if ((events & POLLOUT) != 0) rails_[rail_at(sent_)].wait_for(POLLOUT, fds);
  if ((events & ~POLLOUT) != 0) rails_[rail_at(received_)].wait_for(static_cast<short>(events & ~POLLOUT), fds);
}

bool TcpPipe::hung_up() {
  bool is_gone = false;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    is_gone |= rails_[rail].hung_up();
    report_broken(rail);
  }
  return is_gone;
}

bool TcpPipe::flush() {
  bool is_done = true;
  for (ResumableSocket& rail : rails_) is_done &= rail.flush();
  return is_done;
}

bool TcpPipe::has_unsent() {
  return std::any_of(rails_.begin(), rails_.end(), [](ResumableSocket& rail) { return rail.has_unsent(); });
}

bool TcpPipe::was_connected() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const ResumableSocket& rail) { return !rail.is_unused(); });
}

void TcpPipe::wait_to_flush(std::vector<pollfd>& fds) {
  for (ResumableSocket& rail : rails_) {
    if (!rail.flush()) rail.wait_for(POLLOUT, fds);
  }
}

std::size_t TcpPipe::unconfirmed() const {
  std::size_t bytes = 0;
  for (const ResumableSocket& rail : rails_) bytes += rail.unconfirmed();
  return bytes;
}

}  // namespace netfold::transport
