#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>
#include <netfold/transport/shm/peer_memory.hpp>
#include <netfold/transport/socket.hpp>

#include <cerrno>

namespace netfold::transport {

PeerMemory::PeerMemory(int size)
    : page_(std::make_shared<Mapping>(Mapping::anonymous(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))))),
      peers_(static_cast<std::size_t>(size)) {
  if (!*page_) throw_errno("map a page");
  if (madvise(page_->data(), page_->bytes(), MADV_WIPEONFORK) != 0 ||
      getrandom(page_->data(), sizeof(Mark), 0) != static_cast<ssize_t>(sizeof(Mark))) {
    throw_errno("mark this process's memory");
  }
}

PeerMemory::PeerMemory(const PeerMemory& whole, const std::vector<int>& positions) : page_(whole.page_) {
  for (const int position : positions) peers_.push_back(whole.peers_.at(static_cast<std::size_t>(position)));
}

PeerMemory::ProbeResult PeerMemory::probe(int position, pid_t pid, std::uint64_t mark_address, const Mark& mark) {
  Mark found{};
  const iovec into{found.data(), found.size()};
  const iovec from{reinterpret_cast<void*>(mark_address), found.size()};
  if (process_vm_readv(pid, &into, 1, &from, 1, 0) != static_cast<ssize_t>(found.size())) return ProbeResult::refused;
  if (found != mark) return ProbeResult::another;
  peers_[static_cast<std::size_t>(position)] = {pid, mark_address, mark};
  return ProbeResult::yes;
}

PeerMemory::Access PeerMemory::read(int position, std::byte* to, std::uint64_t from, std::size_t bytes) {
  const Peer& peer = peers_[static_cast<std::size_t>(position)];
  Mark found{};
  const iovec into[2] = {{to, bytes}, {found.data(), found.size()}};
  const iovec source[2] = {{reinterpret_cast<void*>(from), bytes},
                           {reinterpret_cast<void*>(peer.mark_address), found.size()}};
  const ssize_t got = process_vm_readv(peer.pid, into, 2, source, 2, 0);
  if (got == static_cast<ssize_t>(bytes + found.size())) {
    if (found != peer.mark) return Access::gone;
    bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
    return Access::all;
  }
  return got < 0 && errno == ESRCH ? Access::gone : Access::refused;
}

PeerMemory::Access PeerMemory::write(int position, std::uint64_t to, const std::byte* from, std::size_t bytes) {
  const iovec source{const_cast<std::byte*>(from), bytes};
  const iovec into{reinterpret_cast<void*>(to), bytes};
  const pid_t pid = peers_[static_cast<std::size_t>(position)].pid;
  const ssize_t got = process_vm_writev(pid, &source, 1, &into, 1, 0);
  if (got == static_cast<ssize_t>(bytes)) return Access::all;
  return got < 0 && errno == ESRCH ? Access::gone : Access::refused;
}

}  // namespace netfold::transport
