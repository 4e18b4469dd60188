#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <netfold/transport/tcp_pipe.hpp>

#include <cerrno>

namespace netfold::transport {
namespace {

// What a socket holds beyond what is on its way: enough to bridge the millisecond until a busy host's sender runs
// again at 1 Gbit/s several times over. More would let a sender believe that it is through with one peer, and start on
// the next, megabytes too early.
constexpr int kUnsentBytes = 512 << 10;

}  // namespace

TcpPipe::TcpPipe(Fd socket) : socket_(std::move(socket)) {
  const int fd = socket_.get();
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("set non-blocking");
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

Pipe::Io TcpPipe::send(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) return {.bytes = static_cast<std::size_t>(sent)};
  if (errno == EAGAIN || errno == EINTR) return {};
  return {.closed = true, .error = errno};
}

Pipe::Io TcpPipe::receive(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  if (got > 0) return {.bytes = static_cast<std::size_t>(got)};
  if (got == 0) return {.closed = true};
  if (errno == EAGAIN || errno == EINTR) return {};
  return {.closed = true, .error = errno};
}

void TcpPipe::wait_for(short events, std::vector<pollfd>& fds) const { fds.push_back({socket_.get(), events, 0}); }

bool TcpPipe::hung_up() const {
  pollfd look{socket_.get(), POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

std::size_t TcpPipe::unconfirmed() const {
  // A connection that was reset still counts what it will never send.
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == TCP_CLOSE) return 0;
  int bytes = 0;
  return ::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

}  // namespace netfold::transport
