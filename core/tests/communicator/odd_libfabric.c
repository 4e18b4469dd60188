/* Replaces libfabric.so.1 in test_fabric_library.py. Either too old, or a wrapper of the real one that registers no
 * memory, or (WRITES) none for writes.
 *   cc -shared -fPIC -Wl,-soname,libfabric.so.1 [-DOLD | -DREAL="path" [-DWRITES]] odd_libfabric.c -o libfabric.so.1 */
#ifdef OLD
#include <rdma/fabric.h>

uint32_t fi_version(void) { return FI_VERSION(1, 11); }
#endif

#ifdef REAL
#include "../wrapped_libfabric.h"

static struct fi_ops_mr mr_ops;
static int (*register_memory)(struct fid*, const void*, size_t, uint64_t, uint64_t, uint64_t, uint64_t, struct fid_mr**,
                              void*);

static int refuse(struct fid* fid, const void* buf, size_t len, uint64_t access, uint64_t offset, uint64_t key,
                  uint64_t flags, struct fid_mr** mr, void* context) {
#ifdef WRITES
  if (!(access & FI_REMOTE_WRITE)) return register_memory(fid, buf, len, access, offset, key, flags, mr, context);
#endif
  return -FI_ENOMEM;
}

static void change_domain(struct fid_domain* domain) {
  mr_ops = *domain->mr;
  register_memory = mr_ops.reg;
  mr_ops.reg = refuse;
  domain->mr = &mr_ops;
}

static int change_info(struct fi_info* found) {
#ifndef WRITES
  for (; found; found = found->next) found->domain_attr->mr_mode |= FI_MR_LOCAL;
#endif
  return 0;
}
#endif
