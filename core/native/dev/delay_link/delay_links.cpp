#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <netfold/delay_link/delay_links.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace netfold::delay_link {

using transport::Fd;
using transport::now_ns;

namespace {

// The largest super-packet, with the kernel's header before it.
constexpr std::size_t kFrameBytes = (64u << 10) + 256;
// At most so many frames are read from one direction before the next direction is served.
constexpr int kBatchFrames = 64;
// Waking up takes about so long, so the thread polls for frames that are due within it.
constexpr std::int64_t kPollNs = 15'000;
// sizeof(virtio_net_hdr); linux/virtio_net.h does not compile as C++.
constexpr int kHeaderBytes = 10;
// The kernel may hand over packets uncut and without checksums.
constexpr unsigned kOffloads = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
// TUN_F_USO4 and TUN_F_USO6: super-packets of UDP, from Linux 6.2. The headers here may be older than the kernel.
constexpr unsigned kUdpOffloads = 0x20 | 0x40;

// Keeps the calling thread in another network namespace during its lifetime.
class InNamespace {
 public:
  explicit InNamespace(const std::string& netns) : previous_(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC)) {
    const Fd target(open(netns.c_str(), O_RDONLY | O_CLOEXEC));
    if (!previous_ || !target || setns(target.get(), CLONE_NEWNET) != 0) {
      throw DelayLinkError("the network namespace " + netns + " cannot be entered: " + std::strerror(errno));
    }
  }
  ~InNamespace() {
    // The thread came from this namespace; without it the process cannot go on.
    if (setns(previous_.get(), CLONE_NEWNET) != 0) std::abort();
  }
  InNamespace(const InNamespace&) = delete;
  InNamespace& operator=(const InNamespace&) = delete;

 private:
  Fd previous_;
};

// splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t draw(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

bool draw_with(std::uint64_t& state, double ratio) {
  return ratio > 0 && static_cast<double>(draw(state) >> 11) * 0x1p-53 < ratio;
}

Fd open_tap(const Interface& end) {
  const InNamespace inside(end.netns);
  Fd tap(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  ifreq request{};
  request.ifr_flags = static_cast<short>(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | IFF_TUN_EXCL);
  std::strncpy(request.ifr_name, end.device.c_str(), IFNAMSIZ - 1);
  int header_bytes = kHeaderBytes;
  const bool made = tap && ioctl(tap.get(), TUNSETIFF, &request) == 0 &&
                    ioctl(tap.get(), TUNSETVNETHDRSZ, &header_bytes) == 0 &&
                    (ioctl(tap.get(), TUNSETOFFLOAD, kOffloads | kUdpOffloads) == 0 ||
                     ioctl(tap.get(), TUNSETOFFLOAD, kOffloads) == 0);
  if (!made) {
    throw DelayLinkError("the interface " + end.device + " in " + end.netns +
                         " cannot be made: " + std::strerror(errno) + "; a delay wants /dev/net/tun (CONFIG_TUN)");
  }
  return tap;
}

}  // namespace

DelayLinks::DelayLinks() : buffer_(kFrameBytes), epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(transport::make_event()) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = UINT64_MAX}};
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    throw DelayLinkError(std::string("no descriptors for links: ") + std::strerror(errno));
  }
}

DelayLinks::~DelayLinks() { stop(); }

std::size_t DelayLinks::add(const Interface& one, const Interface& other, std::int64_t delay_ns) {
  if (thread_.joinable()) throw DelayLinkError("links are added before they are started");
  const int from = taps_.emplace_back(open_tap(one)).get();
  const int to = taps_.emplace_back(open_tap(other)).get();
  for (const auto& [in, out] : {std::pair{from, to}, std::pair{to, from}}) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = directions_.size()}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, in, &event) != 0) {
      throw DelayLinkError(std::string("a link cannot be watched: ") + std::strerror(errno));
    }
    directions_.push_back(Direction{.from = in, .to = out, .delay_ns = delay_ns, .queue = {}});
  }
  return directions_.size() / 2 - 1;
}

void DelayLinks::set_faults(std::size_t link, const LinkFaults& faults, std::uint64_t seed) {
  const auto is_ratio = [](double ratio) { return ratio >= 0 && ratio <= 1; };
  if (link >= directions_.size() / 2 || !is_ratio(faults.duplicate_ratio) || !is_ratio(faults.reorder_ratio) ||
      faults.reorder_ns < 0) {
    throw DelayLinkError("link " + std::to_string(link) + " of " + std::to_string(directions_.size() / 2) +
                         " cannot have these faults: ratios are from 0 to 1, and the extra delay is not negative");
  }
  const std::lock_guard lock(faults_mutex_);
  for (const std::size_t which : {2 * link, 2 * link + 1}) {
    directions_[which].faults = faults;
    directions_[which].generator = seed + which;
  }
}

void DelayLinks::start() {
  thread_ = std::thread([this] { run(); });
}

void DelayLinks::stop() {
  if (!thread_.joinable()) return;
  signal(wake_);
  thread_.join();
}

void DelayLinks::run() {
  // With the default slack a sleep may end 50 us late.
  prctl(PR_SET_TIMERSLACK, 1UL);
  std::vector<epoll_event> events(directions_.size() + 1);
  for (;;) {
    std::int64_t next_ns = INT64_MAX;
    const std::int64_t before_ns = now_ns();
    for (Direction& direction : directions_) {
      release(direction, before_ns);
      if (!direction.queue.empty()) next_ns = std::min(next_ns, direction.queue.front().due_ns);
    }
    const std::int64_t left_ns = next_ns == INT64_MAX ? INT64_MAX : std::max<std::int64_t>(0, next_ns - now_ns());
    const std::int64_t sleep_ns = left_ns == INT64_MAX ? 0 : std::max<std::int64_t>(0, left_ns - kPollNs);
    const timespec wait = transport::timespec_of(sleep_ns);
    const int count = epoll_pwait2(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   left_ns == INT64_MAX ? nullptr : &wait, nullptr);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t which = events[static_cast<std::size_t>(i)].data.u64;
      if (which == UINT64_MAX) return;
      receive(directions_[which]);
    }
  }
}

void DelayLinks::receive(Direction& direction) {
  for (int i = 0; i < kBatchFrames; ++i) {
    const ssize_t got = read(direction.from, buffer_.data(), buffer_.size());
    if (got <= 0) return;  // no more frames, or the interface is down
    const auto bytes = static_cast<std::size_t>(got);
    std::int64_t extra_ns[2] = {0, 0};
    bool is_duplicated = false;
    {
      const std::lock_guard lock(faults_mutex_);
      const LinkFaults& faults = direction.faults;
      is_duplicated = draw_with(direction.generator, faults.duplicate_ratio);
      for (std::int64_t& extra : extra_ns) {
        if (faults.reorder_ns > 0 && draw_with(direction.generator, faults.reorder_ratio)) {
          extra =
              1 + static_cast<std::int64_t>(draw(direction.generator) % static_cast<std::uint64_t>(faults.reorder_ns));
        }
      }
    }
    enqueue(direction, bytes, extra_ns[0]);
    if (is_duplicated) enqueue(direction, bytes, extra_ns[1]);
  }
}

void DelayLinks::enqueue(Direction& direction, std::size_t bytes, std::int64_t extra_ns) {
  if (direction.queued_bytes + bytes > kMaxQueuedBytes) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Frame frame{now_ns() + direction.delay_ns + extra_ns, bytes, std::make_unique_for_overwrite<std::byte[]>(bytes)};
  std::memcpy(frame.data.get(), buffer_.data(), bytes);
  direction.queued_bytes += bytes;
  const auto later = [](std::int64_t due_ns, const Frame& other) { return due_ns < other.due_ns; };
  // Nearly always at the end.
  const auto place = direction.queue.empty() || direction.queue.back().due_ns <= frame.due_ns
                         ? direction.queue.end()
                         : std::upper_bound(direction.queue.begin(), direction.queue.end(), frame.due_ns, later);
  direction.queue.insert(place, std::move(frame));
}

void DelayLinks::release(Direction& direction, std::int64_t now) {
  while (!direction.queue.empty() && direction.queue.front().due_ns <= now) {
    const Frame& frame = direction.queue.front();
    // An end that is down or full loses the frame, as a cable would.
    if (write(direction.to, frame.data.get(), frame.bytes) < 0) dropped_.fetch_add(1, std::memory_order_relaxed);
    direction.queued_bytes -= frame.bytes;
    direction.queue.pop_front();
  }
}

}  // namespace netfold::delay_link
