/* A library in place of libfabric.so.1 that passes all calls on to the real one, at the path REAL. The source that
 * includes this defines the two functions below. */
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_errno.h>

/* Changes what fi_getinfo found; an error replaces that. */
static int change_info(struct fi_info* found);
/* Changes a domain that was opened. */
static void change_domain(struct fid_domain* domain);

#define PASS_ON(name) ((__typeof__(&name))dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), #name))

static struct fi_ops_fabric fabric_ops;
static int (*open_domain)(struct fid_fabric*, struct fi_info*, struct fid_domain**, void*);

static int domain(struct fid_fabric* fabric, struct fi_info* info, struct fid_domain** made, void* context) {
  int failed = open_domain(fabric, info, made, context);
  if (!failed) change_domain(*made);
  return failed;
}

uint32_t fi_version(void) { return PASS_ON(fi_version)(); }
void fi_freeinfo(struct fi_info* info) { PASS_ON(fi_freeinfo)(info); }
struct fi_info* fi_dupinfo(const struct fi_info* info) { return PASS_ON(fi_dupinfo)(info); }
const char* fi_strerror(int number) { return PASS_ON(fi_strerror)(number); }

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const struct fi_info* hints,
               struct fi_info** found) {
  int failed = PASS_ON(fi_getinfo)(version, node, service, flags, hints, found);
  return failed ? failed : change_info(*found);
}

int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** made, void* context) {
  int failed = PASS_ON(fi_fabric)(attr, made, context);
  if (failed) return failed;
  fabric_ops = *(*made)->ops;
  open_domain = fabric_ops.domain;
  fabric_ops.domain = domain;
  (*made)->ops = &fabric_ops;
  return 0;
}
