// Preloaded into the processes of a chaos run: the real-time clock plus an offset that the run changes. The kernel cannot
// do so for one process: a time namespace moves CLOCK_MONOTONIC and CLOCK_BOOTTIME, only before its first process starts.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t* offset_s;

// From now on this process reads its offset, in seconds, from the first 8 bytes of the file. 0: done.
int netfold_chaos_clock(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  void* page = fd < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (page == MAP_FAILED) return -1;
  offset_s = page;
  return 0;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  now->tv_sec = t.tv_sec;
  now->tv_usec = t.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
