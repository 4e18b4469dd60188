#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <unistd.h>
#include <netfold/transport/process_wide.hpp>
#include <netfold/transport/socket.hpp>

#include <stdexcept>
#include <system_error>
#include <vector>

namespace netfold::transport {
namespace {

// The descriptors of all ProcessFds.
struct ProcessFds {
  std::mutex mutex;
  std::vector<int> fds;

  // Puts /dev/null in the place of each descriptor. The numbers stay in use, so that a late close of one of them in the
  // child closes no other descriptor.
  void replace_in_child() {
    const int null_device = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : fds) ::dup3(null_device, fd, O_CLOEXEC);
    ::close(null_device);
    fds.clear();
  }
  static ProcessFds& all() { return process_wide<ProcessFds, &ProcessFds::mutex, &ProcessFds::replace_in_child>(); }
};

[[maybe_unused]] const auto& made_at_load = ProcessFds::all();

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

ProcessFd::ProcessFd(Fd fd) : fd_(std::move(fd)) {
  if (!fd_) return;
  ProcessFds& all = ProcessFds::all();
  std::lock_guard lock(all.mutex);
  all.fds.push_back(fd_.get());
}

void ProcessFd::reset() {
  if (!fd_) return;
  ProcessFds& all = ProcessFds::all();
  std::lock_guard lock(all.mutex);
  std::erase(all.fds, fd_.get());
  fd_.reset();
}

void throw_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::uint64_t random_bits() {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom");
  return bits;
}

std::int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

Fd make_event() {
  Fd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event) throw_errno("eventfd");
  return event;
}

void signal(const Fd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof one);
}

bool clear(const Fd& event) {
  std::uint64_t value = 0;
  return ::read(event.get(), &value, sizeof value) > 0;
}

int always_readable() {
  static const Fd* const event = [] {
    auto* made = new Fd(make_event());
    signal(*made);
    return made;
  }();
  return event->get();
}

Fd make_timer() {
  Fd timer(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer) throw_errno("timerfd_create");
  return timer;
}

void set_timer(const Fd& timer, std::int64_t delay_ns) {
  const itimerspec once{.it_interval = {}, .it_value = timespec_of(delay_ns)};
  timerfd_settime(timer.get(), 0, &once, nullptr);
}

Address Address::parse(const std::string& host, std::uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.length = sizeof(sockaddr_in6);
  } else {
    throw std::invalid_argument("'" + host + "' is not a numeric IPv4 or IPv6 address");
  }
  return address;
}

namespace {

Address name_of(int fd, int (*get)(int, sockaddr*, socklen_t*), const char* what) {
  Address address;
  address.length = sizeof address.storage;
  if (get(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) throw_errno(what);
  return address;
}

}  // namespace

Address Address::local_of(int fd) { return name_of(fd, getsockname, "getsockname"); }
Address Address::peer_of(int fd) { return name_of(fd, getpeername, "getpeername"); }

std::uint16_t Address::port() const {
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string_view Address::host() const {
  const auto bytes_of = [](const auto& host) {
    return std::string_view(reinterpret_cast<const char*>(&host), sizeof host);
  };
  if (storage.ss_family == AF_INET6) return bytes_of(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  return bytes_of(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr);
}

std::string Address::text() const {
  char host_text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(storage.ss_family, host().data(), host_text, sizeof host_text);
  const std::string name = storage.ss_family == AF_INET6 ? "[" + std::string(host_text) + "]" : host_text;
  return name + ":" + std::to_string(port());
}

namespace {

int set_buffer(int fd, int force, int plain, int bytes) {
  if (setsockopt(fd, SOL_SOCKET, force, &bytes, sizeof bytes) != 0) {
    setsockopt(fd, SOL_SOCKET, plain, &bytes, sizeof bytes);
  }
  int granted = 0;
  socklen_t length = sizeof granted;
  getsockopt(fd, SOL_SOCKET, plain, &granted, &length);
  return granted;
}

}  // namespace

int set_receive_buffer(int fd, int bytes) { return set_buffer(fd, SO_RCVBUFFORCE, SO_RCVBUF, bytes); }
int set_send_buffer(int fd, int bytes) { return set_buffer(fd, SO_SNDBUFFORCE, SO_SNDBUF, bytes); }

}  // namespace netfold::transport
