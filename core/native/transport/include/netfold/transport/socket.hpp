// File descriptors, addresses and system calls that several transports use.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace netfold::transport {

// Owns a descriptor and closes it.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// As Fd, for this process alone: a child made by fork has /dev/null in its place. A peer learns of this process's death
// by the end of the connection. A child that outlives the process, such as a data loader, must not keep it open.
class ProcessFd {
 public:
  ProcessFd() = default;
  explicit ProcessFd(Fd fd);
  ProcessFd(ProcessFd&& other) noexcept = default;
  ProcessFd& operator=(ProcessFd other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~ProcessFd() { reset(); }

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void reset();

 private:
  Fd fd_;
};

// An IPv4 or IPv6 address with its port. Compared by family, address and port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  // `host` is a numeric address; names are resolved above this layer. Throws std::invalid_argument.
  static Address parse(const std::string& host, std::uint16_t port);
  // The address of a socket, and of its peer. Throw std::system_error.
  static Address local_of(int fd);
  static Address peer_of(int fd);
  std::uint16_t port() const;
  // The host's bytes in network order: 4 of IPv4, 16 of IPv6.
  std::string_view host() const;
  std::string text() const;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool operator==(const Address& other) const { return port() == other.port() && host() == other.host(); }
};

// Throws std::system_error of errno, with `what` in front.
[[noreturn]] void throw_errno(const std::string& what);
// Whether a call that failed with this errno may succeed later.
inline bool is_temporary(int error) { return error == EAGAIN || error == EINTR; }

// Random bits of the kernel. Throws std::system_error.
std::uint64_t random_bits();
std::int64_t clock_ns(clockid_t clock);
inline timespec timespec_of(std::int64_t ns) { return {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000}; }
// The steady clock.
inline std::int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

// An eventfd. Throws std::system_error.
Fd make_event();
void signal(const Fd& event);
// Resets an event or a timer. True: it was signalled.
bool clear(const Fd& event);
// An event that is always signalled.
int always_readable();
// A timer of the steady clock, which is off. Throws std::system_error.
Fd make_timer();
// Signals once, after `delay_ns`; 0 turns the timer off.
void set_timer(const Fd& timer, std::int64_t delay_ns);

// Requests a buffer of `bytes`, beyond rmem_max or wmem_max where the process may; returns what the kernel granted.
int set_receive_buffer(int fd, int bytes);
int set_send_buffer(int fd, int bytes);

}  // namespace netfold::transport
