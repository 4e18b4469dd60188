/* Preloaded before libc: reads of eight bytes by any thread but the first take 3 ms longer, as if the thread lost its
 * core. These are the engine's reads of its eventfds.
 * cc -shared -fPIC slow_clears.c -o slow_clears.so, then LD_PRELOAD. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

ssize_t read(int fd, void *into, size_t bytes) {
  if (bytes == 8 && syscall(SYS_gettid) != getpid()) {
    const struct timespec pause = {0, 3000000};
    nanosleep(&pause, 0);
  }
  return syscall(SYS_read, fd, into, bytes);
}
