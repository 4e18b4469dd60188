#include <netfold/transport/fabric/libfabric.hpp>
#include <netfold/transport/fabric/watchdog.hpp>

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <sys/random.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <string>

namespace netfold::transport::fabric {
namespace {

// The version of Debian 12. Later versions kept all that its headers declare.
constexpr std::uint32_t kVersion = FI_VERSION(1, 17);

static_assert(sizeof(Work) == sizeof(fi_context2));

struct Library {
  decltype(&::fi_version) version = nullptr;
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
};

std::string text_of(std::uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

// Enlarges ofi_rxm's buffers, which hold 16 KB by default: a longer message is cut up and copied twice more. libfabric
// reads the variable once, in the first call of fi_getinfo. A value that the user has set is kept.
void enlarge_rxm_buffers() {
  constexpr std::size_t kHeadersBytes = 512;  // of rxm, and of the transport below it
  setenv("FI_OFI_RXM_BUFFER_SIZE", std::to_string(kMaxSegmentBytes + kHeadersBytes).c_str(), 0);
}

Library load() {
  void* handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(std::string("libfabric cannot be opened (") + dlerror() +
                "); install it (apt install libfabric1) or name its folder in LD_LIBRARY_PATH");
  }
  Library library;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) throw Error(std::string("libfabric.so.1 has no ") + name + "; it is not libfabric 1.17");
  };
  find(library.version, "fi_version");
  if (library.version() < kVersion) {
    throw Error("libfabric " + text_of(library.version()) + " is too old; netfold needs " + text_of(kVersion) +
                " or newer");
  }
  find(library.getinfo, "fi_getinfo");
  find(library.freeinfo, "fi_freeinfo");
  find(library.dupinfo, "fi_dupinfo");
  find(library.fabric, "fi_fabric");
  find(library.strerror, "fi_strerror");
  return library;
}

// Never unloaded: providers run threads.
const Library& library() {
  static const Library loaded = load();
  return loaded;
}

struct FreeInfo {
  void operator()(fi_info* info) const { library().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

std::string error_text(int error) { return library().strerror(error < 0 ? -error : error); }

// The providers' endpoints that match `hints`; null where there are none.
Info get_info(const fi_info* hints, const char* source = nullptr) {
  // Set right before the first fi_getinfo, not when the library is opened: the environment may be cleared in between.
  [[maybe_unused]] static const bool is_enlarged = (enlarge_rxm_buffers(), true);
  fi_info* found = nullptr;
  const int result = library().getinfo(kVersion, source, nullptr, source != nullptr ? FI_SOURCE : 0, hints, &found);
  if (result == -FI_ENODATA) return nullptr;
  if (result != 0) throw Error("libfabric does not list its providers: " + error_text(result));
  return Info(found);
}

// The endpoint that netfold requires. Nothing else is needed: no order, no source address.
// provider: empty for any.
// writes: also require RMA.
// in_order: also require that messages arrive after earlier writes.
// gpus: also require RMA from, into and of memory of GPUs.
Info hints_for(const std::string& provider, bool writes, bool in_order = false, Gpus gpus = Gpus::unused) {
  Info hints(library().dupinfo(nullptr));
  if (hints == nullptr) throw Error("libfabric has no memory left");
  hints->caps = FI_TAGGED | FI_SEND | FI_RECV;
  if (writes) hints->caps |= FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
  if (in_order) hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAW;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  if (gpus != Gpus::unused) hints->caps |= FI_READ | FI_REMOTE_READ;
  if (gpus == Gpus::wanted) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
  return hints;
}

std::string as_text(const char* text) { return text != nullptr ? text : ""; }

std::string version_of(const fi_info& info) { return text_of(info.fabric_attr->prov_version); }

std::vector<std::string> demands_of(const fi_info& info) {
  static constexpr std::array<std::pair<int, const char*>, 6> kNames = {{{FI_MR_LOCAL, "local"},
                                                                         {FI_MR_VIRT_ADDR, "virtual addresses"},
                                                                         {FI_MR_ALLOCATED, "allocated"},
                                                                         {FI_MR_PROV_KEY, "provider's keys"},
                                                                         {FI_MR_ENDPOINT, "bound to an endpoint"},
                                                                         {FI_MR_HMEM, "device memory too"}}};
  std::vector<std::string> out;
  for (const auto& [bit, name] : kNames) {
    if ((info.domain_attr->mr_mode & bit) != 0) out.emplace_back(name);
  }
  return out;
}

bool goes_by_host(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN || info.addr_format == FI_SOCKADDR_IN6;
}

// The providers' names in order, each once.
std::string names_in(const Info& found) {
  std::vector<std::string> names;
  for (const fi_info* each = found.get(); each != nullptr; each = each->next) {
    const std::string name = as_text(each->fabric_attr->prov_name);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string locked_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto kib = [](rlim_t bytes) { return std::to_string(bytes >> 10); };
  const std::string most = limit.rlim_max == RLIM_INFINITY ? "unlimited" : kib(limit.rlim_max);
  return "; this process may lock " + kib(limit.rlim_cur) + " KiB of memory (RLIMIT_MEMLOCK): raise it with " +
         (limit.rlim_max > limit.rlim_cur ? "`ulimit -l " + most + "`, beyond that with " : "") +
         "memlock in /etc/security/limits.conf, LimitMEMLOCK of the service, or --ulimit memlock=-1 of the container";
}

// Closes an object of libfabric.
struct Close {
  template <class Fid>
  void operator()(Fid* opened) const {
    fi_close(&opened->fid);
  }
};
template <class Fid>
using Owned = std::unique_ptr<Fid, Close>;

class LibfabricRegistration final : public Registration {
 public:
  // base: the address that peers count from; null where the provider takes virtual addresses.
  LibfabricRegistration(Owned<fid_mr> region, const std::byte* base) : region_(std::move(region)), base_(base) {}
  void* descriptor() const override { return fi_mr_desc(region_.get()); }
  std::uint64_t key() const override { return fi_mr_key(region_.get()); }
  std::uint64_t address(const std::byte* data) const override {
    return reinterpret_cast<std::uint64_t>(data) - reinterpret_cast<std::uint64_t>(base_);
  }

 private:
  Owned<fid_mr> region_;
  const std::byte* base_;
};

class LibfabricEndpoint final : public Endpoint {
 public:
  // host: the address of the interface; empty for a provider without such addresses.
  // gpus: of the hints that led to `info`.
  LibfabricEndpoint(Info info, const std::string& host, bool in_order, Gpus gpus);

  ~LibfabricEndpoint() override { LibfabricEndpoint::close(); }
  void close() override {
    const Watchdog::Call call(watch_);
    endpoint_.reset();
  }
  const Limits& limits() const override { return limits_; }
  // Memory of GPUs was wanted, and this endpoint was opened without it.
  void lacks_gpus(const std::string& why) { limits_.no_gpus = why; }
  std::vector<std::byte> name() const override;
  Peer add(std::span<const std::byte> name) override;
  std::unique_ptr<Registration> register_memory(std::byte* data, std::size_t bytes, Access access,
                                                const Memory& memory) override;
  Taken send(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, std::uint64_t tag,
             Work* work) override {
    const Watchdog::Call call(watch_);
    return taken(fi_tsend(endpoint_.get(), data, bytes, descriptor, to, tag, work));
  }
  Taken inject(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag) override {
    const Watchdog::Call call(watch_);
    return taken(fi_tinject(endpoint_.get(), data, bytes, to, tag));
  }
  Taken write(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, const RemoteBuffer& into,
              std::uint32_t number, Work* work) override {
    const Watchdog::Call call(watch_);
    return taken(
        limits_.orders_writes
            ? fi_write(endpoint_.get(), data, bytes, descriptor, to, into.address, into.key, work)
            : fi_writedata(endpoint_.get(), data, bytes, descriptor, number, to, into.address, into.key, work));
  }
  Taken read(Peer from, std::byte* into, std::size_t bytes, void* descriptor, const RemoteBuffer& of,
             Work* work) override {
    const Watchdog::Call call(watch_);
    return taken(fi_read(endpoint_.get(), into, bytes, descriptor, from, of.address, of.key, work));
  }
  Taken receive(std::byte* into, std::size_t bytes, void* descriptor, Work* work) override {
    constexpr std::uint64_t kAnyTag = ~std::uint64_t{0};
    const Watchdog::Call call(watch_);
    return taken(fi_trecv(endpoint_.get(), into, bytes, descriptor, FI_ADDR_UNSPEC, 0, kAnyTag, work));
  }
  const std::string& why() const override { return why_; }
  std::size_t poll(std::span<Completion> into) override;
  bool may_sleep() override {
    if (wait_fd_ < 0) return true;
    fid* queues[] = {&queue_->fid};
    return fi_trywait(fabric_.get(), queues, 1) == FI_SUCCESS;
  }
  int wait_fd() const override { return wait_fd_; }

 private:
  static constexpr std::size_t kBatch = 32;
  static constexpr int kKeyTries = 8;

  void ask_for_gpus();
  int register_region(std::byte* data, std::size_t bytes, std::uint64_t allowed, const Memory& memory,
                      std::uint64_t key, fid_mr** opened);
  std::uint64_t random_key() const;
  Taken taken(ssize_t result) {
    if (result == 0) return Taken::yes;
    if (result == -FI_EAGAIN) return Taken::later;
    why_ = error_text(static_cast<int>(result));
    return Taken::never;
  }
  void read_error(Completion& into);
  void check(int result, const char* what) const {
    if (result != 0) {
      throw Error("provider " + limits_.provider + " on " + place_ + " cannot " + what + ": " + error_text(result));
    }
  }

  Info info_;
  std::string place_;
  Watchdog watch_;
  const Gpus gpus_;
  Limits limits_;
  bool binds_registrations_ = false;      // FI_MR_ENDPOINT
  bool chooses_keys_ = false;             // netfold chooses the keys: no FI_MR_PROV_KEY
  bool takes_virtual_addresses_ = false;  // FI_MR_VIRT_ADDR
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> queue_;
  Owned<fid_ep> endpoint_;
  int wait_fd_ = -1;
  std::string why_;
};

LibfabricEndpoint::LibfabricEndpoint(Info info, const std::string& host, bool in_order, Gpus gpus)
    : info_(std::move(info)),
      place_(as_text(info_->domain_attr->name) + (host.empty() ? "" : " at " + host)),
      watch_(as_text(info_->fabric_attr->prov_name)),
      gpus_(gpus) {
  limits_.provider = as_text(info_->fabric_attr->prov_name);
  limits_.version = version_of(*info_);
  limits_.domain = as_text(info_->domain_attr->name);
  limits_.message_bytes = info_->ep_attr->max_msg_size;
  limits_.inject_bytes = info_->tx_attr->inject_size;
  limits_.sends = info_->tx_attr->size;
  limits_.receives = info_->rx_attr->size;
  limits_.tag_bits = static_cast<int>(std::bit_width(info_->ep_attr->mem_tag_format));
  limits_.needs_registration = (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
  binds_registrations_ = (info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
  chooses_keys_ = (info_->domain_attr->mr_mode & FI_MR_PROV_KEY) == 0;
  takes_virtual_addresses_ = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  limits_.peers_write = limits_.provider.starts_with("shm");
  limits_.orders_writes = in_order;
  const bool has_numbers = in_order || info_->domain_attr->cq_data_size >= sizeof(std::uint32_t);
  const bool writes = (info_->caps & FI_RMA) != 0 && has_numbers;
  limits_.write_bytes = writes ? info_->ep_attr->max_msg_size : 0;

  fid_fabric* fabric = nullptr;
  check(library().fabric(info_->fabric_attr, &fabric, nullptr), "be opened");
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check(fi_domain(fabric_.get(), info_.get(), &domain, nullptr), "open its domain");
  domain_.reset(domain);
  fi_av_attr of_addresses{};
  of_addresses.type = info_->domain_attr->av_type;
  fid_av* addresses = nullptr;
  check(fi_av_open(domain_.get(), &of_addresses, &addresses, nullptr), "make an address vector");
  addresses_.reset(addresses);
  fi_cq_attr of_queue{};
  of_queue.size = limits_.sends + limits_.receives;
  of_queue.format = FI_CQ_FORMAT_TAGGED;
  of_queue.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  if (fi_cq_open(domain_.get(), &of_queue, &queue, nullptr) == 0) queue_.reset(queue);
  if (queue_ == nullptr || fi_control(&queue_->fid, FI_GETWAIT, &wait_fd_) != 0) {
    wait_fd_ = -1;
    of_queue.wait_obj = FI_WAIT_NONE;
    queue_.reset();
    check(fi_cq_open(domain_.get(), &of_queue, &queue, nullptr), "make a completion queue");
    queue_.reset(queue);
  }
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain_.get(), info_.get(), &endpoint, nullptr), "make an endpoint");
  endpoint_.reset(endpoint);
  check(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "bind its addresses");
  check(fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV), "bind its completion queue");
  if (gpus == Gpus::wanted) ask_for_gpus();
  check(fi_enable(endpoint_.get()), "enable its endpoint");
}

// A provider with FI_HMEM may copy by CUDA through memory of the host. Such a copy waits for the kernels that run, and
// they may wait for the message. So the adapter itself must reach the GPU's memory.
void LibfabricEndpoint::ask_for_gpus() {
  int p2p = FI_HMEM_P2P_REQUIRED;
  const int result = fi_setopt(&endpoint_->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &p2p, sizeof p2p);
  // verbs;ofi_rxm does not know the option, and its writes and reads are always the adapter's.
  const bool is_adapter = result == 0 || (result == -FI_ENOPROTOOPT && limits_.provider.starts_with("verbs"));
  limits_.no_gpus =
      is_adapter ? ""
                 : "its adapter does not reach memory of GPUs itself (FI_OPT_FI_HMEM_P2P: " + error_text(result) + ")";
#ifdef FI_MR_DMABUF
  limits_.takes_dmabuf = is_adapter && library().version() >= FI_VERSION(1, 20);
#endif
}

std::vector<std::byte> LibfabricEndpoint::name() const {
  std::vector<std::byte> name(512);
  std::size_t bytes = name.size();
  check(fi_getname(&endpoint_->fid, name.data(), &bytes), "tell its address");
  name.resize(bytes);
  return name;
}

// libfabric is told no length, so a shorter name than this endpoint's would be read beyond its end. Names of shm are
// texts that end with a 0.
Endpoint::Peer LibfabricEndpoint::add(std::span<const std::byte> name) {
  fi_addr_t peer = FI_ADDR_NOTAVAIL;
  const bool is_text = info_->addr_format == FI_ADDR_STR;
  const bool is_whole = is_text ? !name.empty() && name.back() == std::byte{0} : name.size() == this->name().size();
  const Watchdog::Call call(watch_);
  if (!is_whole || fi_av_insert(addresses_.get(), name.data(), 1, &peer, 0, nullptr) != 1) {
    throw Error("provider " + limits_.provider + " does not take an address of " + std::to_string(name.size()) +
                " bytes; does every rank use the same provider?");
  }
  return peer;
}

int LibfabricEndpoint::register_region(std::byte* data, std::size_t bytes, std::uint64_t allowed, const Memory& memory,
                                       std::uint64_t key, fid_mr** opened) {
  if (!memory.is_gpu()) return fi_mr_reg(domain_.get(), data, bytes, allowed, 0, key, 0, opened, nullptr);
  const iovec range{data, bytes};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = allowed;
  attributes.requested_key = key;
  attributes.iface = FI_HMEM_CUDA;
  attributes.device.cuda = memory.gpu;
  std::uint64_t flags = 0;
#ifdef FI_MR_DMABUF
  // Its address is base_addr + offset.
  const fi_mr_dmabuf dmabuf{memory.dmabuf, memory.offset, bytes, data - memory.offset};
  if (memory.dmabuf >= 0) {
    attributes.dmabuf = &dmabuf;
    flags = FI_MR_DMABUF;
  }
#endif
  return fi_mr_regattr(domain_.get(), &attributes, flags, opened);
}

std::unique_ptr<Registration> LibfabricEndpoint::register_memory(std::byte* data, std::size_t bytes, Access access,
                                                                 const Memory& memory) {
  std::uint64_t allowed = access == Access::messages ? FI_SEND | FI_RECV : FI_WRITE | FI_REMOTE_WRITE;
  // `read` reads from memory of a GPU into the host's.
  if (memory.is_gpu()) allowed |= FI_REMOTE_READ;
  if (!memory.is_gpu() && access == Access::writes && gpus_ != Gpus::unused) allowed |= FI_READ;
  if (access == Access::writes && gpus_ == Gpus::stand_in) allowed |= FI_REMOTE_READ;
  fid_mr* opened = nullptr;
  int result = -FI_ENOKEY;
  for (int tries = 0; tries < kKeyTries && result == -FI_ENOKEY; ++tries) {
    const std::uint64_t key = chooses_keys_ ? random_key() : 0;
    const Watchdog::Call call(watch_);
    result = register_region(data, bytes, allowed, memory, key, &opened);
  }
  if (result != 0 && memory.is_gpu()) {
    throw Error(refused_gpu(limits_.provider, bytes, memory, error_text(result)));
  }
  if (result != 0) {
    const bool may_be_limit = result == -FI_ENOMEM || result == -EPERM || result == -EAGAIN;
    throw Error("provider " + limits_.provider + " cannot register " + std::to_string(bytes) +
                " bytes of memory: " + error_text(result) + (may_be_limit ? locked_memory() : ""));
  }
  Owned<fid_mr> region(opened);
  if (binds_registrations_) {
    check(fi_mr_bind(region.get(), &endpoint_->fid, 0), "bind memory to its endpoint");
    check(fi_mr_enable(region.get()), "enable a registration");
  }
  return std::make_unique<LibfabricRegistration>(std::move(region), takes_virtual_addresses_ ? nullptr : data);
}

// Random, since a peer that guesses a key can write to the memory.
std::uint64_t LibfabricEndpoint::random_key() const {
  std::uint64_t key = 0;
  if (getrandom(&key, sizeof key, 0) != sizeof key) throw Error("no random numbers for a registration's key");
  const std::size_t bytes = std::clamp<std::size_t>(info_->domain_attr->mr_key_size, 1, sizeof key);
  return key >> (8 * (sizeof key - bytes));
}

std::size_t LibfabricEndpoint::poll(std::span<Completion> into) {
  std::array<fi_cq_tagged_entry, kBatch> entries;
  const std::size_t most = std::min(into.size(), entries.size());
  const ssize_t found = [&] {
    const Watchdog::Call call(watch_);
    return fi_cq_read(queue_.get(), entries.data(), most);
  }();
  if (found == -FI_EAGAIN || found == 0) return 0;
  if (found == -FI_EAVAIL) {
    read_error(into[0]);
    return 1;
  }
  if (found < 0) {
    into[0] = {.kind = Completion::Kind::failed, .why = error_text(static_cast<int>(found))};
    return 1;
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(found); ++i) {
    const fi_cq_tagged_entry& entry = entries[i];
    const bool landed = (entry.flags & FI_REMOTE_WRITE) != 0;
    into[i].kind = landed                         ? Completion::Kind::landed
                   : (entry.flags & FI_RECV) != 0 ? Completion::Kind::received
                                                  : Completion::Kind::sent;
    into[i].work = landed ? nullptr : static_cast<Work*>(entry.op_context);
    into[i].bytes = entry.len;
    into[i].tag = landed ? entry.data : entry.tag;
  }
  return static_cast<std::size_t>(found);
}

void LibfabricEndpoint::read_error(Completion& into) {
  fi_cq_err_entry entry{};
  into = {.kind = Completion::Kind::failed};
  const ssize_t found = fi_cq_readerr(queue_.get(), &entry, 0);
  if (found != 1) {
    into.why = "an error without a description: " + error_text(static_cast<int>(found));
    return;
  }
  into.work = static_cast<Work*>(entry.op_context);
  into.why = error_text(entry.err);
  char text[256] = "";
  const char* own = fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, text, sizeof text);
  if (own != nullptr && into.why != own) into.why += " (" + std::string(own) + ")";
}

}  // namespace

std::string library_version() { return text_of(library().version()); }

std::vector<Provider> list_providers() {
  std::vector<Provider> out;
  const Info usable = get_info(hints_for("", false).get());
  const Info all = get_info(nullptr);
  const auto is_usable = [&](const fi_info& one) {
    for (const fi_info* each = usable.get(); each != nullptr; each = each->next) {
      if (as_text(each->fabric_attr->prov_name) == as_text(one.fabric_attr->prov_name) &&
          as_text(each->domain_attr->name) == as_text(one.domain_attr->name) &&
          each->ep_attr->type == one.ep_attr->type) {
        return true;
      }
    }
    return false;
  };
  for (const fi_info* each = all.get(); each != nullptr; each = each->next) {
    Provider one;
    one.name = as_text(each->fabric_attr->prov_name);
    one.version = version_of(*each);
    one.domain = as_text(each->domain_attr->name);
    one.message_bytes = each->ep_attr->max_msg_size;
    one.inject_bytes = each->tx_attr->inject_size;
    one.can_write = (each->caps & FI_RMA) != 0;
    one.manual = each->domain_attr->data_progress == FI_PROGRESS_MANUAL;
    one.registration = demands_of(*each);
    if (each->ep_attr->type == FI_EP_MSG) {
      one.why_not = "it offers connected endpoints only";
    } else if (each->ep_attr->type == FI_EP_DGRAM) {
      one.why_not = "it offers unreliable datagrams only";
    } else if ((each->caps & FI_TAGGED) == 0) {
      one.why_not = "it has no tagged messages";
    } else if (!is_usable(*each)) {
      one.why_not = "it wants a mode of work that netfold has not";
    }
    const bool known = std::any_of(out.begin(), out.end(), [&](const Provider& other) {
      return other.name == one.name && other.domain == one.domain && other.why_not == one.why_not;
    });
    if (!known) out.push_back(std::move(one));
  }
  return out;
}

std::string refused_gpu(const std::string& provider, std::size_t bytes, const Memory& memory, const std::string& why) {
  return "provider " + provider + " cannot register " + std::to_string(bytes) + " bytes of memory of GPU " +
         std::to_string(memory.gpu) + ": " + why +
         "; load the kernel module nvidia_peermem, or have messages go through " +
         "the host's memory (NETFOLD_NCCL_CUDA=off)";
}

namespace {

// Null where no provider has what is required.
std::unique_ptr<LibfabricEndpoint> open_with(const Info& hints, const std::string& host, int rail, bool in_order,
                                             Gpus gpus) {
  Info found = get_info(hints.get());
  if (found == nullptr) return nullptr;
  if (goes_by_host(*found)) {
    Info on_interface = get_info(hints.get(), host.c_str());
    if (on_interface == nullptr && gpus == Gpus::wanted) return nullptr;
    if (on_interface == nullptr) {
      throw Error("provider " + as_text(found->fabric_attr->prov_name) +
                  " does not go over the interface with the address " + host + " (NETFOLD_INTERFACE)");
    }
    return std::make_unique<LibfabricEndpoint>(std::move(on_interface), host, in_order, gpus);
  }
  fi_info* chosen = found.get();
  for (int skipped = 0; skipped < rail && chosen != nullptr; ++skipped) chosen = chosen->next;
  if (chosen == nullptr && gpus == Gpus::wanted) return nullptr;
  if (chosen == nullptr) {
    throw Error("provider " + as_text(found->fabric_attr->prov_name) + " has no device number " + std::to_string(rail) +
                "; name as many interfaces as there are devices (NETFOLD_INTERFACE)");
  }
  return std::make_unique<LibfabricEndpoint>(Info(library().dupinfo(chosen)), "", in_order, gpus);
}

// The same, with as much as there is of writes and their order. Memory of GPUs needs writes.
std::unique_ptr<LibfabricEndpoint> open_with_any(const std::string& provider, const std::string& host, int rail,
                                                 Gpus gpus, Numbers numbers) {
  // Prefer writes with messages in order behind them: the number of a write is more to transfer, and ofi_rxm 1.17
  // dereferences a null pointer where a connection ends in the middle of a write with a number.
  for (const auto& [writes, in_order] : {std::pair(true, true), {true, false}, {false, false}}) {
    if ((in_order && numbers == Numbers::always) || (!writes && gpus != Gpus::unused)) continue;
    auto opened = open_with(hints_for(provider, writes, in_order, gpus), host, rail, in_order, gpus);
    if (opened != nullptr) return opened;
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<Endpoint> open_endpoint(const std::string& provider, const std::string& host, int rail, Gpus gpus,
                                        Numbers numbers) {
  std::string no_gpus;
  if (gpus == Gpus::wanted) {
    try {
      auto opened = open_with_any(provider, host, rail, gpus, numbers);
      if (opened != nullptr && opened->limits().no_gpus.empty()) return opened;
      no_gpus = opened != nullptr ? opened->limits().no_gpus : "it does not offer memory of GPUs (FI_HMEM)";
    } catch (const Error& error) {
      no_gpus = error.what();
    }
  }
  if (auto opened = open_with_any(provider, host, rail, gpus == Gpus::wanted ? Gpus::unused : gpus, numbers)) {
    if (gpus == Gpus::wanted) opened->lacks_gpus(no_gpus);
    return opened;
  }
  throw Error("libfabric " + library_version() + " has no provider '" + provider +
              "' with reliable datagrams and tagged messages on this host; those that have: " +
              names_in(get_info(hints_for("", false).get())) + " (netfold doctor fabric says more)");
}

}  // namespace netfold::transport::fabric
