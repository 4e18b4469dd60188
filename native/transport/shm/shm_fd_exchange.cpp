#include <sys/mman.h>
#include <sys/socket.h>
#include <netfold/transport/shm/shm_fd_exchange.hpp>

#include <cstring>

namespace netfold::transport {

ShmFdExchange::ShmFdExchange() : removals_seen_(ShmRegistry::instance().removals()) {}

void ShmFdExchange::add(Fd link, std::atomic<std::uint32_t>& sent, const std::atomic<std::uint32_t>& came) {
  peers_.push_back({.link = std::move(link), .sent = &sent, .came = &came});
}

ShmFdExchange::~ShmFdExchange() {
  for (Peer& peer : peers_) {
    for (const auto& [id, mapping] : peer.mapped) munmap(mapping.address, mapping.bytes);
  }
}

bool ShmFdExchange::send(Peer& peer, const ControlMessage& message_out, int fd) {
  iovec piece{const_cast<ControlMessage*>(&message_out), sizeof message_out};
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
  // A local socket takes so short a message whole or not at all.
  if (sendmsg(peer.link.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof message_out)) {
    return false;
  }
  // A reader that sees this count, or a post published after it, finds the message in its socket.
  peer.sent->fetch_add(1, std::memory_order_release);
  return true;
}

void ShmFdExchange::announce_removed() {
  const auto& regions = ShmRegistry::instance();
  const std::uint64_t removals = regions.removals();
  if (removals == removals_seen_) return;
  bool all = true;
  for (Peer& peer : peers_) {
    for (auto id = peer.offered.begin(); id != peer.offered.end();) {
      if (regions.holds(*id)) {
        ++id;
      } else if (send(peer, {Operation::unmap, 0, *id, 0}, -1)) {
        id = peer.offered.erase(id);
      } else {
        all = false;
        break;
      }
    }
  }
  if (all) removals_seen_ = removals;
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
    ControlMessage message_out{};
    iovec piece{&message_out, sizeof message_out};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(peer.link.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) !=
        static_cast<ssize_t>(sizeof message_out)) {
      return;
    }
    ++peer.read;
    Fd fd;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      fd = Fd(number);
    }
    const auto old = peer.mapped.find(message_out.id);
    if (message_out.operation == Operation::unmap && old != peer.mapped.end()) {
      munmap(old->second.address, old->second.bytes);
      peer.mapped.erase(old);
    } else if (message_out.operation == Operation::map && fd && old == peer.mapped.end()) {
      void* mapped = mmap(nullptr, message_out.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
      if (mapped != MAP_FAILED) peer.mapped[message_out.id] = {static_cast<std::byte*>(mapped), message_out.bytes};
    }
  }
}

std::byte* ShmFdExchange::mapped(int position, std::uint64_t id, std::size_t offset, std::size_t bytes) {
  Peer& peer = peers_[static_cast<std::size_t>(position)];
  read_control_messages(peer);
  const auto found = peer.mapped.find(id);
  if (found == peer.mapped.end() || offset > found->second.bytes || bytes > found->second.bytes - offset) {
    return nullptr;
  }
  return found->second.address + offset;
}

}  // namespace netfold::transport
