#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <netfold/transport/shm/shm_fd_exchange.hpp>

#include <cstring>

namespace netfold::transport {

ShmFdExchange::ShmFdExchange() : removals_announced_(ShmRegistry::instance().removals()) {}

void ShmFdExchange::add(Fd link, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came) {
  peers_.push_back({.link = std::move(link), .sent = &sent, .came = &came});
}

bool ShmFdExchange::send(Peer& peer, const ControlMessage& control_message, int fd) {
  iovec piece{const_cast<ControlMessage*>(&control_message), sizeof control_message};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)];
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  // A local socket takes a message this short as a whole or not at all.
  const ssize_t sent = sendmsg(peer.link.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(sizeof control_message)) return false;
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
      } else if (send(peer, {Operation::unmap, 0, *id, 0}, -1)) {
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
  Peer& peer = peers_[static_cast<std::size_t>(position)];
  if (!peer.link || peer.offered.contains(region.id)) return true;
  if (!send(peer, {Operation::map, 0, region.id, region.bytes}, region.fd.get())) return false;
  peer.offered.insert(region.id);
  return true;
}

void ShmFdExchange::exchange() {
  announce_removed();
  for (Peer& peer : peers_) {
    if (peer.link) read_control_messages(peer);
  }
}

void ShmFdExchange::read_control_messages(Peer& peer) {
  const std::uint32_t came = peer.came->load(std::memory_order_acquire);
  while (peer.read != came) {
    ControlMessage control_message{};
    iovec piece{&control_message, sizeof control_message};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(peer.link.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got != static_cast<ssize_t>(sizeof control_message)) return;
    ++peer.read;
    Fd fd;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      fd = Fd(number);
    }
    if (control_message.operation == Operation::unmap) {
      peer.mapped.erase(control_message.id);
    } else if (control_message.operation == Operation::map && fd && !peer.mapped.contains(control_message.id)) {
      auto region = Mapping::shared(fd.get(), control_message.bytes, MAP_POPULATE);
      if (region) peer.mapped.emplace(control_message.id, std::move(region));
    }
  }
}

std::byte* ShmFdExchange::mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes) {
  Peer& peer = peers_[static_cast<std::size_t>(position)];
  read_control_messages(peer);
  const auto found = peer.mapped.find(id);
  if (found == peer.mapped.end()) return nullptr;
  const Mapping& region = found->second;
  return offset <= region.bytes() && bytes <= region.bytes() - offset ? region.data() + offset : nullptr;
}

}  // namespace netfold::transport
