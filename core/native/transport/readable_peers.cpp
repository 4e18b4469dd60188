#include <sys/epoll.h>
#include <netfold/transport/readable_peers.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <utility>

namespace netfold::transport {
namespace {

// A rail of a rank's connection, as the epoll set names it.
std::uint64_t connection_of(int peer, int rail) {
  return static_cast<std::uint64_t>(peer) << 32 | static_cast<std::uint32_t>(rail);
}
std::pair<int, int> of_connection(std::uint64_t connection) {
  return {static_cast<int>(connection >> 32), static_cast<int>(connection & 0xffffffff)};
}

}  // namespace

ReadablePeers::ReadablePeers(Mesh& mesh, ShmNode* node)
    : mesh_(mesh),
      node_(node),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      in_memory_(static_cast<std::size_t>(mesh.size())) {
  if (!epoll_) throw_errno("make an epoll set for a receive from any rank");
  for (int position = 0; node_ != nullptr && position < node_->size(); ++position) {
    in_memory_[static_cast<std::size_t>(node_->rank(position))] = true;
  }
  for (const int peer : mesh_.made()) is_closed(peer) ? closed(peer) : watch(peer);
}

// A rank with some rails closed counts: a look at it would make them again.
bool ReadablePeers::is_closed(int peer) {
  int rail = 0;
  for (auto* socket = mesh_.rail(peer, rail); socket != nullptr; socket = mesh_.rail(peer, ++rail)) {
    if (socket->is_broken() && !socket->is_unused() && !socket->has_unread()) return true;
  }
  return false;
}

void ReadablePeers::watch(int peer) {
  std::erase(closed_, peer);
  marked_.push_back(peer);
  int rail = 0;
  for (auto* socket = mesh_.rail(peer, rail); socket != nullptr; socket = mesh_.rail(peer, ++rail)) {
    if (socket->descriptor() < 0) continue;
    epoll_event event{.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data = {.u64 = connection_of(peer, rail)}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket->descriptor(), &event) != 0 && errno != EEXIST) {
      throw_errno("watch a connection for a receive from any rank");
    }
    is_watching_ = true;
  }
}

void ReadablePeers::closed(int peer) {
  if (std::ranges::find(closed_, peer) == closed_.end()) closed_.push_back(peer);
}

std::vector<int> ReadablePeers::to_ask(std::int64_t now_ns) {
  if (closed_.empty() || began_ns_ == 0 || now_ns < std::max(next_ask_ns_, began_ns_ + kAskNs)) return {};
  next_ask_ns_ = now_ns + kAskNs;
  const auto end = closed_.begin() + static_cast<std::ptrdiff_t>(std::min(closed_.size(), kAskedAtOnce));
  std::vector<int> asked(closed_.begin(), end);
  std::rotate(closed_.begin(), end, closed_.end());
  return asked;
}

void ReadablePeers::take(std::vector<int>& peers) {
  mesh_.take_readable(peers);
  const auto report = [&](int peer) {
    // A connection beside memory or a fabric's stream carries no bytes of the stream, and the pipe looks at it only
    // after several calls.
    const bool is_beside = in_memory_[static_cast<std::size_t>(peer)] || !mesh_.shows_bytes(peer);
    if (is_beside && mesh_.was_connected(peer)) mesh_.hung_up(peer);
    peers.push_back(peer);
  };
  for (const int peer : marked_) report(peer);
  marked_.clear();
  std::array<epoll_event, 64> events;
  for (std::size_t count = events.size(); is_watching_ && count == events.size();) {
    const int found = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    count = static_cast<std::size_t>(std::max(found, 0));
    for (std::size_t i = 0; i < count; ++i) {
      const auto [peer, rail] = of_connection(events[i].data.u64);
      // A read would take the agreed end for a break, and make the connection again. What it still holds is reported
      // once it is closed.
      const auto* socket = mesh_.rail(peer, rail);
      if (socket == nullptr || !socket->is_released()) report(peer);
    }
  }
  if (node_ != nullptr) node_->take_written([&](int position) { peers.push_back(node_->rank(position)); });
}

std::int64_t ReadablePeers::wait_for(std::vector<pollfd>& fds, std::int64_t now_ns) {
  std::int64_t next_ns = connect_some(now_ns);
  if (!closed_.empty()) {
    const std::int64_t ask_ns = std::max(next_ask_ns_, began_ns_ + kAskNs);
    next_ns = next_ns < 0 ? ask_ns : std::min(next_ns, ask_ns);
  }
  fds.push_back({epoll_.get(), POLLIN, 0});
  mesh_.wait_for_readable(fds);
  if (node_ != nullptr) node_->await_bytes();
  return marked_.empty() ? next_ns : now_ns;
}

std::int64_t ReadablePeers::connect_some(std::int64_t now_ns) {
  if (began_ns_ == 0) began_ns_ = now_ns;
  const int others = mesh_.size() - 1;
  const int all = node_ == nullptr ? others : 2 * others;
  for (int made = 0; looked_at_ < all; ++looked_at_) {
    const bool of_memory = looked_at_ >= others;
    const std::int64_t due_ns = of_memory ? std::max(next_look_ns_, began_ns_ + kConnectNs) : next_look_ns_;
    if (now_ns < due_ns) return due_ns;
    const int peer = (mesh_.rank() + 1 + looked_at_ % others) % mesh_.size();
    if (in_memory_[static_cast<std::size_t>(peer)] != of_memory || mesh_.was_connected(peer)) continue;
    mesh_.hung_up(peer);  // makes the connection
    if (++made == kConnectsAtOnce) next_look_ns_ = now_ns + kConnectPauseNs;
  }
  return -1;
}

}  // namespace netfold::transport
