// Preloaded before libstdc++ and libc: counts the work of a process, so that a test can compare it between small and
// large groups whatever the machine does.
//
// c++ -shared -fPIC counted_work.cpp -o counted_work.so -ldl, then LD_PRELOAD.
#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <new>

extern "C" {
std::atomic<long> allocated_bytes{0};  // by operator new
std::atomic<long> receive_calls{0};
std::atomic<long> awaited_descriptors{0};  // of all sleeps

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static const auto real = reinterpret_cast<decltype(&recvmsg)>(dlsym(RTLD_NEXT, "recvmsg"));
  ++receive_calls;
  return real(fd, message, flags);
}

int ppoll(pollfd* fds, nfds_t count, const timespec* timeout, const sigset_t* mask) {
  static const auto real = reinterpret_cast<decltype(&ppoll)>(dlsym(RTLD_NEXT, "ppoll"));
  awaited_descriptors += static_cast<long>(count);
  return real(fds, count, timeout, mask);
}
}

void* operator new(std::size_t bytes) {
  allocated_bytes += static_cast<long>(bytes);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
