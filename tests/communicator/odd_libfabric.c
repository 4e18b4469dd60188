/* Replaces libfabric.so.1 in test_fabric_library.py. Either too old, or a wrapper of the real one that registers no
 * memory, or (WRITES) none for writes.
 *   cc -shared -fPIC -Wl,-soname,libfabric.so.1 [-DOLD | -DREAL="path" [-DWRITES]] odd_libfabric.c -o libfabric.so.1 */
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>

#ifdef OLD
uint32_t fi_version(void) { return FI_VERSION(1, 11); }
#endif

#ifdef REAL
#define PASS_ON(name) ((__typeof__(&name))dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), #name))

static struct fi_ops_fabric fabric_ops;
static struct fi_ops_mr mr_ops;
static int (*register_memory)(struct fid *, const void *, size_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              struct fid_mr **, void *);
static int (*open_domain)(struct fid_fabric *, struct fi_info *, struct fid_domain **, void *);

static int refuse(struct fid *fid, const void *buf, size_t len, uint64_t access, uint64_t offset, uint64_t key,
                  uint64_t flags, struct fid_mr **mr, void *context) {
#ifdef WRITES
  if (!(access & FI_REMOTE_WRITE)) return register_memory(fid, buf, len, access, offset, key, flags, mr, context);
#endif
  return -FI_ENOMEM;
}

static int domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **made, void *context) {
  int failed = open_domain(fabric, info, made, context);
  if (failed) return failed;
  mr_ops = *(*made)->mr;
  register_memory = mr_ops.reg;
  mr_ops.reg = refuse;
  (*made)->mr = &mr_ops;
  return 0;
}

uint32_t fi_version(void) { return PASS_ON(fi_version)(); }
void fi_freeinfo(struct fi_info *info) { PASS_ON(fi_freeinfo)(info); }
struct fi_info *fi_dupinfo(const struct fi_info *info) { return PASS_ON(fi_dupinfo)(info); }
const char *fi_strerror(int number) { return PASS_ON(fi_strerror)(number); }

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **found) {
  int failed = PASS_ON(fi_getinfo)(version, node, service, flags, hints, found);
  if (failed) return failed;
#ifndef WRITES
  for (struct fi_info *each = *found; each; each = each->next) each->domain_attr->mr_mode |= FI_MR_LOCAL;
#endif
  return 0;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **made, void *context) {
  int failed = PASS_ON(fi_fabric)(attr, made, context);
  if (failed) return failed;
  fabric_ops = *(*made)->ops;
  open_domain = fabric_ops.domain;
  fabric_ops.domain = domain;
  (*made)->ops = &fabric_ops;
  return 0;
}
#endif
