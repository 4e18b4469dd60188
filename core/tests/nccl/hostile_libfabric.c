/* Stands in for libfabric.so.1 in one rank, and passes its calls on to the real one. `hostile` says which messages it
 * changes on their way out, as a faulty or hostile peer would send them, and what becomes of reads.
 *   cc -shared -fPIC -Wl,-soname,libfabric.so.1 -DREAL="path" hostile_libfabric.c -o libfabric.so.1 */
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <string.h>

#include "../wrapped_libfabric.h"

/* As in core/tests/nccl/hostile.py. */
enum { HONEST, LONGER, TWICE, FOREIGN, EAGER, REFUSED, READ_REFUSED, READ_FAILS, READ_HANGS, UNOPENED };
int hostile = HONEST;
int changed = 0; /* messages */
int reads = 0;

/* MessageHeader and WrittenTrailer of stream.hpp, FrameHeader of message_matcher.hpp. */
struct message {
  uint32_t sequence, read, bytes;
  uint16_t type, magic;
};
enum { SEGMENT = 1, WRITTEN = 4 };
struct frame {
  uint32_t magic;
  uint8_t type, dtype, failure, orderly;
  int32_t tag;
  uint32_t gpu_chunk_bytes;
  uint64_t id, bytes;
};
enum { FRAME_EAGER = 1, ANNOUNCE = 2, ACCEPT = 3, CHUNK = 4 };
struct trailer {
  uint32_t number, bytes;
};

static void change(const void* data, size_t length) {
  static uint32_t first_number;
  const struct message* message = data;
  struct frame* frame = (struct frame*)(message + 1);
  if (!hostile || length < sizeof *message + sizeof *frame || frame->magic != 0x4e465031) return;
  struct trailer* trailer = (struct trailer*)((char*)data + length) - 1;
  if (message->type == WRITTEN && frame->type == CHUNK) {
    if (hostile == LONGER && !changed) {
      frame->bytes *= 2;
    } else if (hostile == TWICE && !first_number) {
      first_number = trailer->number;
      return;
    } else if (hostile == TWICE) {
      trailer->number = first_number;
    } else if (hostile == FOREIGN) {
      trailer->number ^= 1;
    } else {
      return;
    }
  } else if (message->type == SEGMENT && hostile == EAGER && frame->type == ANNOUNCE) {
    frame->type = FRAME_EAGER;
  } else if (message->type == SEGMENT && hostile == REFUSED && frame->type == ACCEPT) {
    frame->gpu_chunk_bytes = 0;
  } else {
    return;
  }
  ++changed;
}

static struct fi_ops_domain domain_ops;
static struct fi_ops_tagged tagged_ops;
static struct fi_ops_rma rma_ops;
static __typeof__(domain_ops.endpoint) open_endpoint;
static __typeof__(tagged_ops.send) pass_send;
static __typeof__(rma_ops.read) pass_read;

static ssize_t tagged_send(struct fid_ep* ep, const void* data, size_t length, void* desc, fi_addr_t to, uint64_t tag,
                           void* context) {
  change(data, length);
  return pass_send(ep, data, length, desc, to, tag, context);
}

static ssize_t rma_read(struct fid_ep* ep, void* into, size_t length, void* desc, fi_addr_t from, uint64_t address,
                        uint64_t key, void* context) {
  if (hostile == READ_REFUSED) return -FI_EIO;
  if (hostile == READ_HANGS) return 0;
  ssize_t result = pass_read(ep, into, length, desc, from, address, hostile == READ_FAILS ? key ^ 1 : key, context);
  reads += result == 0;
  return result;
}

static int endpoint(struct fid_domain* domain, struct fi_info* info, struct fid_ep** made, void* context) {
  int failed = open_endpoint(domain, info, made, context);
  if (failed) return failed;
  tagged_ops = *(*made)->tagged;
  pass_send = tagged_ops.send;
  tagged_ops.send = tagged_send;
  (*made)->tagged = &tagged_ops;
  rma_ops = *(*made)->rma;
  pass_read = rma_ops.read;
  rma_ops.read = rma_read;
  (*made)->rma = &rma_ops;
  return 0;
}

static void change_domain(struct fid_domain* domain) {
  domain_ops = *domain->ops;
  open_endpoint = domain_ops.endpoint;
  domain_ops.endpoint = endpoint;
  domain->ops = &domain_ops;
}

static int change_info(struct fi_info* found) {
  (void)found;
  return hostile == UNOPENED ? -FI_ENODATA : 0;
}
