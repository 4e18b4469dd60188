// A CUDA driver library without a device, for tests: the functions that netfold calls, and fake_* for the tests.
//
// A stream is an ordered queue. A thread of its own runs each entry DELAY_NS after the entry before, so nothing is
// done when a call returns. Memory is the host's: `fake_own` says which of it is a device's, and cuMemHostRegister
// which is pinned.
//
// Calls that CUDA's documentation forbids, or that would silently do something else, fail and are kept for
// `fake_fault`: a stream or event used with another current context than its own; an event queried or waited for before
// it was recorded (CUDA says: done); a copy of memory that is not the device's, or of host memory that is not pinned
// (CUDA would block); unpinned memory of a copy that is still to come; a query while a graph is captured, by a thread
// that is not in the relaxed mode; pinned memory allocated while a kernel runs (CUDA may wait for the kernel).
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL = 700 };
enum { UNSUPPORTED_IN_CAPTURE = 900 };
enum { DEVICES = 8, RANGES = 4096, DELAY_NS = 50000, DEVICE_ORDINAL = 9, PAGE = 4096 };

typedef struct {
  int device, broken, hangs;
  long queries;
} Context;
typedef struct {
  Context* context;
  uint64_t recorded, done;
} Event;
typedef struct Entry {
  enum { COPY, RECORD, WAIT, HOLD } kind;
  void* to;
  const void* from;
  size_t bytes;
  int to_device;
  Event* event;
  uint64_t number;
  struct Entry* next;
} Entry;
typedef struct {
  Context* context;
  Entry *first, *last;
  uint64_t given, done;
  int ends;
  pthread_t thread;
} Stream;
typedef struct {
  uintptr_t begin, end;
  int device;  // -1: pinned host memory
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Context contexts[DEVICES];
static Range ranges[RANGES];
static int range_count, held, capturing, computing;
static long copies_done[2];
static char fault_text[400], fail_name[60];
static long fail_after = -1;
static int fail_code;
static Stream* streams[RANGES];
static int stream_count;
static __thread Context* current;
static __thread int mode;

static int fault(int code, const char* what) {
  if (!fault_text[0]) snprintf(fault_text, sizeof fault_text, "%s", what);
  return code;
}

// The code of an error that was ordered for it, or of its broken device.
static int enter(const char* name, const Context* context) {
  if (!strcmp(name, fail_name) && fail_after >= 0 && fail_after-- == 0) {
    if (context) contexts[context->device].broken = fail_code;
    return fail_code;
  }
  return context ? context->broken : SUCCESS;
}

static int owns(uintptr_t at, size_t bytes, int device) {
  for (int i = 0; i < range_count; ++i) {
    if (ranges[i].device == device && ranges[i].begin <= at && at + bytes <= ranges[i].end) return 1;
  }
  return 0;
}

static void* serve(void* of) {
  Stream* stream = of;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!stream->first && !stream->ends) pthread_cond_wait(&changed, &lock);
    Entry* entry = stream->first;
    if (!entry) break;
    struct timespec pause = {0, DELAY_NS};
    pthread_mutex_unlock(&lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&lock);
    while (stream->context->hangs || (entry->kind == WAIT && entry->event->done < entry->number) ||
           (entry->kind == HOLD && held)) {
      pthread_cond_wait(&changed, &lock);
    }
    if (!stream->context->broken) {
      if (entry->kind == COPY) {
        memcpy(entry->to, entry->from, entry->bytes);
        ++copies_done[entry->to_device];
      }
    }
    if (entry->kind == RECORD && entry->event->done < entry->number) entry->event->done = entry->number;
    stream->first = entry->next;
    ++stream->done;
    free(entry);
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void give(Stream* stream, Entry entry) {
  Entry* made = malloc(sizeof *made);
  *made = entry;
  made->next = NULL;
  if (stream->first) {
    stream->last->next = made;
  } else {
    stream->first = made;
  }
  stream->last = made;
  ++stream->given;
  pthread_cond_broadcast(&changed);
}

#define LOCKED(body)           \
  pthread_mutex_lock(&lock);   \
  int result = (body);         \
  pthread_mutex_unlock(&lock); \
  return result;

// --- the driver's functions ------------------------------------------------------------------------------------------

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuDeviceGetCount(int* count) {
  *count = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : DEVICES;
  return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < DEVICES ? SUCCESS : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  contexts[device].device = device;
  *context = &contexts[device];
  return SUCCESS;
}

int cuCtxSetCurrent(Context* context) {
  current = context;
  return SUCCESS;
}

int cuCtxGetCurrent(Context** context) {
  *context = current;
  return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int* value) {
  int before = mode;
  mode = *value;
  *value = before;
  return SUCCESS;
}

int cuStreamCreate(Stream** stream, unsigned flags) {
  if (!current) return fault(INVALID_CONTEXT, "cuStreamCreate without a context");
  if (flags != 1) return fault(INVALID_VALUE, "a stream that waits for the legacy default stream");
  Stream* made = calloc(1, sizeof *made);
  made->context = current;
  pthread_mutex_lock(&lock);
  streams[stream_count++] = made;
  pthread_mutex_unlock(&lock);
  pthread_create(&made->thread, NULL, serve, made);
  *stream = made;
  return SUCCESS;
}

static int create_event(Event** event) {
  int error = enter("cuEventCreate", current);
  if (error) return error;
  if (!current) return fault(INVALID_CONTEXT, "cuEventCreate without a context");
  *event = calloc(1, sizeof **event);
  (*event)->context = current;
  return SUCCESS;
}
int cuEventCreate(Event** event, unsigned flags) {
  if (flags != 2) return fault(INVALID_VALUE, "an event that takes times");
  LOCKED(create_event(event))
}

static int record(Event* event, Stream* stream) {
  int error = enter("cuEventRecord", stream->context);
  if (error) return error;
  if (current != stream->context) return fault(INVALID_CONTEXT, "cuEventRecord in another context than the stream's");
  if (event->context != stream->context) return fault(INVALID_HANDLE, "cuEventRecord of another device's event");
  give(stream, (Entry){.kind = RECORD, .event = event, .number = ++event->recorded});
  return SUCCESS;
}
int cuEventRecord(Event* event, Stream* stream) { LOCKED(record(event, stream)) }

static int query(Event* event) {
  int error = enter("cuEventQuery", event->context);
  ++event->context->queries;
  if (error) return error;
  if (capturing && mode != 2) return fault(UNSUPPORTED_IN_CAPTURE, "cuEventQuery ended another thread's capture");
  if (!event->recorded) return fault(INVALID_HANDLE, "cuEventQuery of an event that was never recorded");
  return event->done >= event->recorded ? SUCCESS : NOT_READY;
}
int cuEventQuery(Event* event) { LOCKED(query(event)) }

static int wait_event(Stream* stream, Event* event) {
  int error = enter("cuStreamWaitEvent", stream->context);
  if (error) return error;
  if (!current) return fault(INVALID_CONTEXT, "cuStreamWaitEvent without a context");
  if (!event->recorded) return fault(INVALID_HANDLE, "cuStreamWaitEvent for an event that was never recorded");
  give(stream, (Entry){.kind = WAIT, .event = event, .number = event->recorded});
  return SUCCESS;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  (void)flags;
  LOCKED(wait_event(stream, event))
}

static int copy(const char* name, void* to, const void* from, size_t bytes, Stream* stream, int to_device) {
  int error = enter(name, stream->context);
  if (error) return error;
  if (current != stream->context) return fault(INVALID_CONTEXT, "a copy in another context than the stream's");
  if (!bytes) return fault(INVALID_VALUE, "a copy of no bytes");
  if (!owns((uintptr_t)(to_device ? to : from), bytes, stream->context->device)) {
    return fault(ILLEGAL, "a copy of memory that is not the device's");
  }
  if (!owns((uintptr_t)(to_device ? from : to), bytes, -1)) {
    return fault(INVALID_VALUE, "a copy of host memory that is not pinned");
  }
  give(stream, (Entry){.kind = COPY, .to = to, .from = from, .bytes = bytes, .to_device = to_device});
  return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  LOCKED(copy("cuMemcpyDtoHAsync", to, (const void*)(uintptr_t)from, bytes, stream, 0))
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  LOCKED(copy("cuMemcpyHtoDAsync", (void*)(uintptr_t)to, from, bytes, stream, 1))
}

static int own(uintptr_t address, size_t bytes, int device) {
  if (range_count == RANGES) abort();
  ranges[range_count++] = (Range){address, address + bytes, device};
  return SUCCESS;
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  (void)flags;
  LOCKED(own((uintptr_t)address, bytes, -1))
}

static int allocate(void** memory, size_t bytes) {
  int error = enter("cuMemHostAlloc", current);
  if (error) return error;
  if (!current) return fault(INVALID_CONTEXT, "cuMemHostAlloc without a context");
  if (computing) return fault(NOT_READY, "cuMemHostAlloc waits for a kernel that runs");
  *memory = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  return own((uintptr_t)*memory, bytes, -1);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  (void)flags;
  LOCKED(allocate(memory, bytes))
}

static int device_of(int* value, int attribute, uintptr_t address) {
  if (attribute != DEVICE_ORDINAL) return fault(INVALID_VALUE, "cuPointerGetAttribute of another attribute");
  for (int i = 0; i < range_count; ++i) {
    *value = ranges[i].device;
    if (ranges[i].device >= 0 && ranges[i].begin <= address && address < ranges[i].end) return SUCCESS;
  }
  return INVALID_VALUE;
}
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  LOCKED(device_of(value, attribute, (uintptr_t)address))
}

static int unpin(uintptr_t address) {
  for (int i = 0; i < range_count; ++i) {
    if (ranges[i].device != -1 || ranges[i].begin != address) continue;
    for (int s = 0; s < stream_count; ++s) {
      for (Entry* entry = streams[s]->first; entry; entry = entry->next) {
        uintptr_t host = (uintptr_t)(entry->to_device ? entry->from : entry->to);
        if (entry->kind == COPY && host >= address && host < ranges[i].end) {
          return fault(INVALID_VALUE, "unpinned memory of a copy that is still to come");
        }
      }
    }
    ranges[i] = ranges[--range_count];
    return SUCCESS;
  }
  return fault(INVALID_VALUE, "unpinned memory that was not pinned");
}
int cuMemHostUnregister(void* address) { LOCKED(unpin((uintptr_t)address)) }

static int synchronize(Stream* stream) {
  while (stream->done < stream->given) pthread_cond_wait(&changed, &lock);
  return stream->context->broken;
}
int cuStreamSynchronize(Stream* stream) { LOCKED(synchronize(stream)) }

int cuGetErrorString(int error, const char** text) {
  *text = error == ILLEGAL            ? "an illegal memory access was encountered"
          : error == INVALID_CONTEXT  ? "invalid device context"
          : error == INVALID_HANDLE   ? "invalid resource handle"
                                      : NULL;
  return *text ? SUCCESS : INVALID_VALUE;
}

// --- for tests -------------------------------------------------------------------------------------------------------

// The memory at `address` is of `device`.
int fake_own(void* address, size_t bytes, int device) { LOCKED(own((uintptr_t)address, bytes, device)) }

// Have a stream do nothing until `fake_release`.
static int hold(Stream* stream) {
  held = 1;
  give(stream, (Entry){.kind = HOLD});
  return SUCCESS;
}
int fake_hold(Stream* stream) { LOCKED(hold(stream)) }

static int set(int* value, int to) {
  *value = to;
  pthread_cond_broadcast(&changed);
  return SUCCESS;
}
int fake_release(void) { LOCKED(set(&held, 0)) }
int fake_set_hangs(int device, int hangs) { LOCKED(set(&contexts[device].hangs, hangs)) }
int fake_set_capturing(int on) { LOCKED(set(&capturing, on)) }
// Kernels run until it is off.
int fake_set_computing(int on) { LOCKED(set(&computing, on)) }

// Have the call of `name` after `after` others of it fail with `code`, and all later calls of that device.
static int fail(const char* name, long after, int code) {
  snprintf(fail_name, sizeof fail_name, "%s", name);
  fail_after = after;
  fail_code = code;
  return SUCCESS;
}
int fake_fail(const char* name, long after, int code) { LOCKED(fail(name, after, code)) }

// The copies that are done: to_device 0, from devices to the host; 1, back.
long fake_copies(int to_device) {
  pthread_mutex_lock(&lock);
  long found = copies_done[to_device];
  pthread_mutex_unlock(&lock);
  return found;
}

// How often events of a device were queried.
long fake_queries(int device) {
  pthread_mutex_lock(&lock);
  long found = contexts[device].queries;
  pthread_mutex_unlock(&lock);
  return found;
}

// Wait until `count` copies are done, up to `wait_s`. A caller that has a lock of its own, as Python's, keeps it.
long fake_await_copies(int to_device, long count, int wait_s) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += wait_s;
  pthread_mutex_lock(&lock);
  while (copies_done[to_device] < count && !pthread_cond_timedwait(&changed, &lock, &until)) continue;
  long found = copies_done[to_device];
  pthread_mutex_unlock(&lock);
  return found;
}

// The first fault; empty: none.
const char* fake_fault(void) { return fault_text; }

// Forget faults, errors, memory and counts. Streams without work end.
int fake_reset(void) {
  pthread_mutex_lock(&lock);
  fault_text[0] = fail_name[0] = 0;
  fail_after = -1;
  held = capturing = computing = range_count = 0;
  copies_done[0] = copies_done[1] = 0;
  for (int i = 0; i < DEVICES; ++i) contexts[i].broken = contexts[i].hangs = 0;
  for (int i = 0; i < stream_count; ++i) streams[i]->ends = 1;
  stream_count = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
