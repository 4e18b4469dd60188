#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>
#include <netfold/transport/shm/peer_memory.hpp>
#include <netfold/transport/socket.hpp>

#include <cerrno>

namespace netfold::transport {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

PeerMemory::PeerMemory(int size) : peers_(static_cast<std::size_t>(size)) {
  void* page = mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw_errno("map a page");
  mark_ = static_cast<Mark*>(page);
  if (madvise(page, page_bytes(), MADV_WIPEONFORK) != 0 ||
      getrandom(mark_->data(), mark_->size(), 0) != static_cast<ssize_t>(mark_->size())) {
    const int error = errno;
    munmap(page, page_bytes());
    errno = error;
    throw_errno("mark this process's memory");
  }
}

PeerMemory::~PeerMemory() { munmap(mark_, page_bytes()); }

PeerMemory::ProbeResult PeerMemory::probe(int position, pid_t pid, std::uint64_t mark_address, const Mark& mark) {
  Mark found{};
  const iovec into{found.data(), found.size()};
  const iovec from{reinterpret_cast<void*>(mark_address), found.size()};
  if (process_vm_readv(pid, &into, 1, &from, 1, 0) != static_cast<ssize_t>(found.size())) return ProbeResult::refused;
  if (found != mark) return ProbeResult::another;
  peers_[static_cast<std::size_t>(position)] = {pid, mark_address, mark};
  return ProbeResult::yes;
}

PeerMemory::Read PeerMemory::read(int position, std::byte* to, std::uint64_t from, std::size_t bytes) {
  const Peer& peer = peers_[static_cast<std::size_t>(position)];
  Mark found{};
  const iovec into[2] = {{to, bytes}, {found.data(), found.size()}};
  const iovec source[2] = {{reinterpret_cast<void*>(from), bytes},
                           {reinterpret_cast<void*>(peer.mark_address), found.size()}};
  const ssize_t got = process_vm_readv(peer.pid, into, 2, source, 2, 0);
  if (got == static_cast<ssize_t>(bytes + found.size())) {
    if (found != peer.mark) return Read::gone;
    bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
    return Read::all;
  }
  return got < 0 && errno == ESRCH ? Read::gone : Read::refused;
}

}  // namespace netfold::transport
