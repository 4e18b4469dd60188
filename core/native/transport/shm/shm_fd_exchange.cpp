#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <netfold/transport/shm/shm_fd_exchange.hpp>

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace netfold::transport {
namespace {

// Compares in the same time for any bytes.
bool same(const ShmFdExchange::Token& one, const ShmFdExchange::Token& other) {
  std::byte difference{};
  for (std::size_t i = 0; i < one.size(); ++i) difference |= one[i] ^ other[i];
  return difference == std::byte{};
}

}  // namespace

ShmFdExchange::ShmFdExchange(Fd socket, std::string name, const Token& token, int self)
    : socket_(std::move(socket)),
      event_(make_event()),
      name_(std::move(name)),
      token_(token),
      self_(self),
      removals_announced_(ShmRegistry::instance().removals()) {}

void ShmFdExchange::add(int rank, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came) {
  Peer peer;
  peer.sent = &sent;
  peer.came = &came;
  const std::string name = name_ + std::to_string(rank);
  // The name of an abstract address follows a zero byte.
  if (name.size() + 1 > sizeof peer.address.sun_path) throw std::invalid_argument("the socket's name is too long");
  peer.address.sun_family = AF_UNIX;
  std::memcpy(peer.address.sun_path + 1, name.data(), name.size());
  peer.address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  peers_.push_back(std::move(peer));
}

bool ShmFdExchange::send(int socket, const Peer& peer, Operation operation, int fd, std::uint64_t id,
                         std::uint64_t bytes) {
  Message content{.token = token_, .operation = operation, .sender = self_, .id = id, .bytes = bytes};
  iovec piece{&content, sizeof content};
  msghdr message{};
  message.msg_name = const_cast<sockaddr_un*>(&peer.address);
  message.msg_namelen = peer.address_bytes;
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)]{};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof content);
}

void ShmFdExchange::ring(int position) {
  const Peer& peer = at(position);
  if (peer.event) return signal(peer.event);
  if (send(peer, Operation::ring, -1) || errno != EAGAIN) return;
  // Either the peer has unread messages, and so is rung; or messages to other ranks, who have not read them, fill the
  // send buffer of this rank's socket. A new socket has a send buffer of its own.
  const Fd fresh(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (fresh) send(fresh.get(), peer, Operation::ring, -1, 0, 0);
}

void ShmFdExchange::clear() {
  if (transport::clear(event_)) return;
  for (int i = 0; i < kMessages && read_message(); ++i) {
  }
}

bool ShmFdExchange::send_counted(Peer& peer, Operation operation, int fd, std::uint64_t id, std::uint64_t bytes) {
  if (!send(peer, operation, fd, id, bytes)) return false;
  // A reader that sees this count, or a post published after it, finds the message in its socket.
  peer.sent->fetch_add(1, std::memory_order_release);
  return true;
}

void ShmFdExchange::announce_removed() {
  const auto& registry = ShmRegistry::instance();
  const std::uint64_t removals = registry.removals();
  if (removals == removals_announced_) return;
  bool is_complete = true;
  for (Peer& peer : peers_) {
    for (auto id = peer.offered.begin(); id != peer.offered.end();) {
      if (registry.holds(*id)) {
        ++id;
      } else if (send_counted(peer, Operation::unmap, -1, *id, 0)) {
        id = peer.offered.erase(id);
      } else {
        is_complete = false;
        break;
      }
    }
  }
  if (is_complete) removals_announced_ = removals;
}

bool ShmFdExchange::offer(int position, const ShmRegion& region) {
  Peer& peer = at(position);
  if (peer.offered.contains(region.id)) return true;
  if (!send_counted(peer, Operation::map, region.fd.get(), region.id, region.bytes)) return false;
  peer.offered.insert(region.id);
  return true;
}

void ShmFdExchange::exchange() {
  announce_removed();
  for (const Peer& peer : peers_) read_from(peer);
}

void ShmFdExchange::read_from(const Peer& peer) {
  const std::uint32_t came = peer.came->load(std::memory_order_acquire);
  while (static_cast<std::int32_t>(came - peer.read) > 0 && read_message()) {
  }
}

bool ShmFdExchange::read_message() {
  Message content{};
  iovec piece{&content, sizeof content};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int));  // CMSG_SPACE has place for two descriptors
  const ssize_t got = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  Fd fd;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    fd = Fd(number);
  }
  const bool is_whole = got == static_cast<ssize_t>(sizeof content) && (message.msg_flags & MSG_TRUNC) == 0;
  const bool is_of_peer =
      content.sender >= 0 && content.sender != self_ && static_cast<std::size_t>(content.sender) < peers_.size();
  if (is_whole && is_of_peer && same(content.token, token_)) handle(content, std::move(fd));
  return true;
}

void ShmFdExchange::handle(const Message& message, Fd fd) {
  Peer& peer = at(message.sender);
  switch (message.operation) {
    case Operation::ring:
      // The peer rings by a message again where it has no more places for events.
      if (!peer.has_own_event) peer.has_own_event = send(peer, Operation::event, event_.get());
      break;
    case Operation::event:
      if (!fd || peer.event || peer_events_ == kPeerEvents) break;
      peer.event = std::move(fd);
      ++peer_events_;
      break;
    case Operation::map:
      ++peer.read;
      if (fd && !peer.mapped.contains(message.id)) {
        auto region = Mapping::shared(fd.get(), message.bytes, MAP_POPULATE);
        if (region) peer.mapped.emplace(message.id, std::move(region));
      }
      break;
    case Operation::unmap:
      ++peer.read;
      peer.mapped.erase(message.id);
      break;
  }
}

std::byte* ShmFdExchange::mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes) {
  Peer& peer = at(position);
  read_from(peer);
  const auto found = peer.mapped.find(id);
  if (found == peer.mapped.end()) return nullptr;
  const Mapping& region = found->second;
  return offset <= region.bytes() && bytes <= region.bytes() - offset ? region.data() + offset : nullptr;
}

}  // namespace netfold::transport
