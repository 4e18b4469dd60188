#include <netfold/transport/fabric/libfabric.hpp>
#include <netfold/transport/fabric/strict_endpoint.hpp>
#include <netfold/transport/mapping.hpp>
#include <netfold/transport/socket.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

namespace netfold::transport::fabric {
namespace {

constexpr std::size_t kMessageBytes = 4096;
constexpr std::size_t kInjectBytes = 16;
constexpr std::size_t kWriteBytes = 512 << 10;
// The most completions that are held back at once.
constexpr std::size_t kHeld = 6;
// The longest delay of a completion on a rail that loses everything. Its sender may give up that rail before.
constexpr std::chrono::milliseconds kLate{2500};

struct Strictness {
  std::uint64_t seed = 1;
  std::uint64_t fails = 0;  // after this many sends, every send fails with a completion; 0: never
  std::uint64_t loses = 0;  // after this many sends, every send is lost but completes; 0: never
  std::uint64_t drops = 0;  // one in this many sends is lost in the same way; 0: none
  std::uint64_t early = 0;  // this many sends are lost in the same way, before all others
  std::uint64_t hmem = 0;   // 1: memory of GPUs can be registered, where it is wanted; 2: every registration is refused
};

[[noreturn]] void broken(const std::string& rule) { throw std::logic_error("strict fabric: " + rule); }

// The file behind a mapping of this process, and the offset of `data` in it. Throws std::logic_error where there is none.
struct File {
  Fd descriptor;
  std::uint64_t offset = 0;
};

File file_of(const std::byte* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uintptr_t first = 0, last = 0;
    std::uint64_t offset = 0;
    std::string permissions, device;
    ino_t inode = 0;
    fields >> std::hex >> first;
    fields.ignore(1) >> last >> permissions >> offset >> device >> std::dec >> inode;
    if (address < first || address >= last) continue;
    if (!permissions.starts_with("---s")) broken("memory of a GPU is a shared mapping without permissions");
    for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
      struct stat found{};
      if (stat(each.path().c_str(), &found) != 0 || found.st_ino != inode || !S_ISREG(found.st_mode)) continue;
      return {Fd(open(each.path().c_str(), O_RDWR | O_CLOEXEC)), offset + (address - first)};
    }
  }
  broken("memory of a GPU is a mapping of a file that this process has open");
}

class StrictRegistration final : public Registration {
 public:
  // all: the endpoint's registrations, which list this one while it lives.
  // own: the stand-in's mapping of memory of a GPU, in which `offset` is the place of `data`; empty for the host's.
  StrictRegistration(std::set<const StrictRegistration*>& all, std::unique_ptr<Registration> below, std::byte* data,
                     std::size_t bytes, Access access, Mapping own, std::size_t offset)
      : all_(all),
        own_(std::move(own)),
        below_(std::move(below)),
        data_(data),
        bytes_(bytes),
        access_(access),
        offset_(offset) {
    all_.insert(this);
  }
  ~StrictRegistration() override { all_.erase(this); }
  // To be passed with every use of this memory.
  void* descriptor() const override { return const_cast<StrictRegistration*>(this); }
  std::uint64_t key() const override { return below_->key(); }
  std::uint64_t address(const std::byte* data) const override { return below_->address(usable(data)); }
  // The place by which the wrapped endpoint knows `data`.
  const std::byte* usable(const std::byte* data) const { return own_ ? own_.data() + offset_ + (data - data_) : data; }
  // Whether the bytes that peers know by this address are in this memory of a GPU, and their place.
  bool reads_as(const Endpoint::RemoteBuffer& buffer, std::size_t bytes) const {
    const bool is_ours = own_ && buffer.key == key() && buffer.address >= address(data_);
    return is_ours && buffer.address - address(data_) + bytes <= bytes_;
  }
  void* below() const { return below_ == nullptr ? nullptr : below_->descriptor(); }
  bool holds(const std::byte* data, std::size_t bytes, Access access) const {
    return data >= data_ && data + bytes <= data_ + bytes_ && access == access_;
  }
  // Whether a caller's memory is still mapped. Other memory at the same address is not detected.
  bool is_mapped() const {
    if (access_ == Access::messages) return true;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(data_) / page * page;
    const std::size_t bytes = reinterpret_cast<std::uintptr_t>(data_) + bytes_ - first;
    std::vector<unsigned char> pages((bytes + page - 1) / page);
    return mincore(reinterpret_cast<void*>(first), bytes, pages.data()) == 0;
  }

 private:
  std::set<const StrictRegistration*>& all_;
  Mapping own_;
  std::unique_ptr<Registration> below_;
  std::byte* data_;
  std::size_t bytes_;
  Access access_;
  std::size_t offset_;
};

class StrictEndpoint final : public Endpoint {
 public:
  StrictEndpoint(std::unique_ptr<Endpoint> below, const Strictness& strictness, Gpus gpus)
      : below_(std::move(below)), strictness_(strictness), random_(strictness.seed), limits_(below_->limits()) {
    needs_below_ = limits_.needs_registration;
    limits_.provider = "strict+" + limits_.provider;
    limits_.message_bytes = std::min(limits_.message_bytes, kMessageBytes);
    limits_.inject_bytes = std::min(limits_.inject_bytes, kInjectBytes);
    limits_.write_bytes = std::min(limits_.write_bytes, kWriteBytes);
    limits_.needs_registration = true;
    limits_.takes_dmabuf = gpus == Gpus::wanted && strictness.hmem > 0;
    if (gpus == Gpus::wanted) limits_.no_gpus = strictness.hmem > 0 ? "" : "it was told to have none (hmem)";
  }

  const Limits& limits() const override { return limits_; }
  std::vector<std::byte> name() const override { return below_->name(); }
  Peer add(std::span<const std::byte> name) override {
    const Peer peer = below_->add(name);
    if (std::ranges::equal(name, below_->name())) self_ = peer;
    return peer;
  }
  std::unique_ptr<Registration> register_memory(std::byte* data, std::size_t bytes, Access access,
                                                const Memory& memory) override;

  Taken send(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, std::uint64_t tag,
             Work* work) override {
    if (refuses()) return Taken::later;
    if (bytes > limits_.message_bytes) broken("a message of " + std::to_string(bytes) + " bytes is too long");
    begin(work, data, bytes, descriptor, Access::messages);
    deferred_.push_back({Deferred::Kind::send, to, const_cast<std::byte*>(data), bytes, descriptor, tag, {}, work});
    return Taken::yes;
  }
  Taken write(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, const RemoteBuffer& into,
              std::uint32_t number, Work* work) override {
    if (refuses()) return Taken::later;
    if (bytes > limits_.write_bytes) broken("a write of " + std::to_string(bytes) + " bytes is too long");
    begin(work, data, bytes, descriptor, Access::writes);
    deferred_.push_back(
        {Deferred::Kind::write, to, const_cast<std::byte*>(data), bytes, descriptor, number, into, work});
    return Taken::yes;
  }
  Taken read(Peer from, std::byte* into, std::size_t bytes, void* descriptor, const RemoteBuffer& of,
             Work* work) override {
    if (refuses()) return Taken::later;
    if (from != self_) broken("memory of a GPU is read from another endpoint");
    begin(work, into, bytes, descriptor, Access::writes);
    deferred_.push_back({Deferred::Kind::read, from, into, bytes, descriptor, 0, of, work});
    return Taken::yes;
  }
  Taken inject(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag) override {
    if (refuses()) return Taken::later;
    if (bytes > limits_.inject_bytes) broken(std::to_string(bytes) + " bytes are too many to inject");
    if (is_lost()) return Taken::yes;
    return below_->inject(to, data, bytes, tag);
  }
  Taken receive(std::byte* into, std::size_t bytes, void* descriptor, Work* work) override {
    if (refuses()) return Taken::later;
    begin(work, into, bytes, descriptor, Access::messages);
    deferred_.push_back({Deferred::Kind::receive, 0, into, bytes, descriptor, 0, {}, work});
    return Taken::yes;
  }
  const std::string& why() const override { return below_->why(); }
  std::size_t poll(std::span<Completion> into) override;
  bool may_sleep() override { return deferred_.empty() && held_.empty() && lost_.empty() && below_->may_sleep(); }
  int wait_fd() const override { return below_->wait_fd(); }

 private:
  // An operation that was not passed to the wrapped endpoint yet.
  struct Deferred {
    enum class Kind : std::uint8_t { send, receive, write, read };
    Kind kind;
    Peer to;
    std::byte* data;
    std::size_t bytes;
    void* descriptor;
    std::uint64_t tag;    // the number of a write
    RemoteBuffer remote;  // of a write or read
    Work* work;
  };

  bool chance(std::uint64_t of) { return random_() % of == 0; }
  bool refuses() { return chance(3); }
  // Counts a send, and decides whether it is lost.
  bool is_lost() {
    const bool all = ++sends_ > strictness_.loses && strictness_.loses > 0;
    return all || sends_ <= strictness_.early || (strictness_.drops > 0 && chance(strictness_.drops));
  }
  void begin(Work* work, const std::byte* data, std::size_t bytes, void* descriptor, Access access);
  void end(Work* work);
  Taken pass_on(const Deferred& operation);
  void pass_on_some();

  std::set<const StrictRegistration*> registrations_;
  std::unique_ptr<Endpoint> below_;
  Strictness strictness_;
  std::mt19937_64 random_;
  Limits limits_;
  bool needs_below_ = false;
  Peer self_ = ~Peer{0};
  std::uint64_t sends_ = 0;
  std::set<Work*> in_progress_;
  std::deque<Deferred> deferred_;
  // Lost operations, by the time of their completion.
  std::multimap<std::chrono::steady_clock::time_point, Work*> lost_;
  std::vector<Completion> held_;
};

std::unique_ptr<Registration> StrictEndpoint::register_memory(std::byte* data, std::size_t bytes, Access access,
                                                              const Memory& memory) {
  Mapping own;
  std::size_t offset = 0;
  if (memory.is_gpu()) {
    if (!limits_.no_gpus.empty()) broken("memory of a GPU is registered that cannot be");
    if (strictness_.hmem > 1) throw Error(refused_gpu(limits_.provider, bytes, memory, "it was told to refuse"));
    File file = memory.dmabuf >= 0 ? File{Fd(dup(memory.dmabuf)), memory.offset} : file_of(data);
    offset = file.offset;
    own = Mapping::shared(file.descriptor.get(), offset + bytes);
    if (!own) throw Error("no second mapping of memory of a GPU");
  }
  std::byte* usable = own ? own.data() + offset : data;
  const bool known_below = needs_below_ || access == Access::writes;
  auto below = known_below ? below_->register_memory(usable, bytes, access, Memory()) : nullptr;
  return std::make_unique<StrictRegistration>(registrations_, std::move(below), data, bytes, access, std::move(own),
                                              offset);
}

void StrictEndpoint::begin(Work* work, const std::byte* data, std::size_t bytes, void* descriptor, Access access) {
  const auto* registration = static_cast<const StrictRegistration*>(descriptor);
  if (!registrations_.contains(registration) || !registration->holds(data, bytes, access)) {
    broken("memory is used that was not registered, or not for this use, or with a wrong descriptor");
  }
  if (!in_progress_.insert(work).second) broken("a Work is used that is in progress");
  for (void*& reserved : work->reserved) reserved = work;
}

void StrictEndpoint::end(Work* work) {
  if (in_progress_.erase(work) == 0) broken("a Work completes that was not in progress");
}

Endpoint::Taken StrictEndpoint::pass_on(const Deferred& operation) {
  const auto& [kind, to, memory, bytes, of_registration, tag, remote, work] = operation;
  const auto* registration = static_cast<const StrictRegistration*>(of_registration);
  if (!registrations_.contains(registration)) broken("a registration was closed while its memory was the provider's");
  void* descriptor = registration->below();
  auto* data = const_cast<std::byte*>(registration->usable(memory));
  if (kind == Deferred::Kind::send) return below_->send(to, data, bytes, descriptor, tag, work);
  if (kind == Deferred::Kind::receive) return below_->receive(data, bytes, descriptor, work);
  if (kind == Deferred::Kind::read) {
    const auto is_read = [&](const StrictRegistration* each) { return each->reads_as(remote, bytes); };
    if (std::ranges::none_of(registrations_, is_read)) broken("memory is read that is no registered memory of a GPU");
    return below_->read(to, data, bytes, descriptor, remote, work);
  }
  return below_->write(to, data, bytes, descriptor, remote, static_cast<std::uint32_t>(tag), work);
}

void StrictEndpoint::pass_on_some() {
  for (const StrictRegistration* each : registrations_) {
    if (!each->is_mapped()) broken("memory was freed that is registered");
  }
  std::size_t count = deferred_.size();
  while (count-- > 0) {
    const Deferred next = deferred_.front();
    deferred_.pop_front();
    if (!chance(2)) {
      deferred_.push_back(next);
      continue;
    }
    for (const void* reserved : next.work->reserved) {
      if (reserved != next.work) broken("a Work was written to while it was the provider's");
    }
    const bool is_send = next.kind == Deferred::Kind::send || next.kind == Deferred::Kind::write;
    if (is_send && is_lost()) {
      const bool all = strictness_.loses > 0 && sends_ > strictness_.loses;
      const std::chrono::milliseconds delay(all ? random_() % kLate.count() : 0);
      lost_.emplace(std::chrono::steady_clock::now() + delay, next.work);
      continue;
    }
    if (is_send && strictness_.fails > 0 && sends_ > strictness_.fails) {
      held_.push_back({.kind = Completion::Kind::failed, .work = next.work, .why = "this wire was told to fail"});
      continue;
    }
    const auto taken = pass_on(next);
    if (taken == Taken::later) {
      if (is_send) --sends_;  // it was not sent yet
      deferred_.push_back(next);
    }
    if (taken == Taken::never) {
      held_.push_back({.kind = Completion::Kind::failed, .work = next.work, .why = below_->why()});
    }
  }
}

std::size_t StrictEndpoint::poll(std::span<Completion> into) {
  pass_on_some();
  const auto now = std::chrono::steady_clock::now();
  for (auto at = lost_.begin(); at != lost_.end() && at->first <= now; at = lost_.erase(at)) {
    held_.push_back({.kind = Completion::Kind::sent, .work = at->second, .why = {}});
  }
  const std::size_t arrived = below_->poll(into);
  for (std::size_t i = 0; i < arrived; ++i) held_.push_back(std::move(into[i]));
  std::shuffle(held_.begin(), held_.end(), random_);
  std::size_t given = 0;
  while (given < into.size() && !held_.empty() && (held_.size() > kHeld || chance(2))) {
    if (held_.back().work != nullptr) end(held_.back().work);
    into[given++] = std::move(held_.back());
    held_.pop_back();
  }
  return given;
}

}  // namespace

std::unique_ptr<Endpoint> open_named_endpoint(const std::string& name, const std::string& host, int rail, Gpus gpus) {
  const auto plus = name.find('+');
  if (!name.starts_with("strict") || plus == std::string::npos) return open_endpoint(name, host, rail, gpus);
  Strictness strictness;
  std::uint64_t only_rail = ~std::uint64_t{0};
  const std::map<std::string, std::uint64_t*> settings = {{"seed", &strictness.seed},   {"fails", &strictness.fails},
                                                          {"loses", &strictness.loses}, {"drops", &strictness.drops},
                                                          {"early", &strictness.early}, {"rail", &only_rail},
                                                          {"hmem", &strictness.hmem}};
  std::istringstream text(name.substr(0, plus));
  std::string field;
  std::getline(text, field, ':');
  bool is_valid = field == "strict";
  while (is_valid && std::getline(text, field, ':')) {
    const auto equals = std::min(field.find('='), field.size());
    const auto found = settings.find(field.substr(0, equals));
    const char* end = field.data() + field.size();
    is_valid = found != settings.end() && equals + 1 < field.size() &&
               std::from_chars(field.data() + equals + 1, end, *found->second).ptr == end;
  }
  if (!is_valid) {
    throw Error("'" + name + "' is no strict provider; expected strict+PROVIDER, optionally with :seed=N, :fails=N, " +
                ":loses=N, :drops=N, :early=N, :hmem=1 and :rail=N before the +");
  }
  if (only_rail != ~std::uint64_t{0} && only_rail != static_cast<std::uint64_t>(rail)) {
    strictness.fails = strictness.loses = strictness.drops = strictness.early = 0;
  }
  strictness.seed += static_cast<std::uint64_t>(rail);
  const bool stand_in = gpus == Gpus::wanted && strictness.hmem > 0;
  return std::make_unique<StrictEndpoint>(
      open_endpoint(name.substr(plus + 1), host, rail, stand_in ? Gpus::stand_in : Gpus::unused, Numbers::always),
      strictness, gpus);
}

}  // namespace netfold::transport::fabric
