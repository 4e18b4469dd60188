#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <netfold/transport/mesh.hpp>

#include <algorithm>
#include <cerrno>

namespace netfold::transport {

Mesh::Mesh(int rank, std::vector<Fd> peers) : rank_(rank), peers_(std::move(peers)), places_(peers_.size()) {
  for (Fd& peer : peers_) {
    if (!peer) continue;
    const int flags = fcntl(peer.get(), F_GETFL);
    if (flags < 0 || fcntl(peer.get(), F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("set non-blocking");
    const int on = 1;
    setsockopt(peer.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
}

Mesh::Io Mesh::send(int peer, std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t sent = ::sendmsg(fd(peer), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) return {.bytes = static_cast<std::size_t>(sent)};
  if (errno == EAGAIN || errno == EINTR) return {};
  return {.closed = true, .error = errno};
}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

Mesh::Io Mesh::receive(int peer, std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t got = ::recvmsg(fd(peer), &message, MSG_DONTWAIT);
  if (got > 0) return {.bytes = static_cast<std::size_t>(got)};
  if (got == 0) return {.closed = true};
  if (errno == EAGAIN || errno == EINTR) return {};
  return {.closed = true, .error = errno};
}

bool Mesh::hung_up(int peer) const {
  pollfd look{fd(peer), POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

std::size_t Mesh::unconfirmed(int peer) const {
  if (fd(peer) < 0) return 0;
  // A connection that was reset still counts what it will never send.
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd(peer), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == TCP_CLOSE) return 0;
  int bytes = 0;
  return ::ioctl(fd(peer), SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

void Mesh::close() {
  for (Fd& peer : peers_) peer.reset();
}

}  // namespace netfold::transport
