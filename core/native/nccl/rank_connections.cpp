#include "rank_connections.hpp"

#include <poll.h>
#include <netfold/transport/tcp/tcp_pipe.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace netfold::nccl {
namespace {

using transport::Mesh;
using transport::now_ns;

// All pipes that there will be are there from the beginning.
class NoPipes final : public transport::PipeMaker {
 public:
  explicit NoPipes(bool is_secured) : is_secured_(is_secured) {}
  std::unique_ptr<transport::Pipe> make(int peer) override {
    throw std::logic_error("there is no connection to rank " + std::to_string(peer));
  }
  // A socket may take part of a record; `flush` writes the rest.
  bool needs_progress() const override { return is_secured_; }

 private:
  bool is_secured_;
};

using Pipes = std::vector<std::unique_ptr<transport::Pipe>>;
using Purposes = std::array<Pipes, MemberLink::kPurposes>;

void add(Purposes& pipes, int peer, bool has_dialled, Connections connections, const Handle& handle,
         MemberLinks& links) {
  Endpoint& endpoint = Endpoint::instance();
  const bool is_resumable = endpoint.is_resumable(connections.sockets.front());
  auto link = std::make_shared<MemberLink>(connections.id, has_dialled, peer, connections.sockets.size(),
                                           [&endpoint] { endpoint.wake(); });
  for (std::size_t purpose = 0; purpose < connections.sockets.size(); ++purpose) {
    std::vector<transport::Fd> one;
    one.push_back(std::move(connections.sockets[purpose]));
    pipes[purpose][static_cast<std::size_t>(peer)] = std::make_unique<transport::TcpPipe>(
        std::move(one), std::vector{connections.secrets[purpose]}, is_resumable,
        [link, purpose](int, bool) { link->note_broken(static_cast<int>(purpose)); });
  }
  links.add(std::move(link), handle);
}

[[noreturn]] void fail(int peer, const std::string& why) {
  throw std::runtime_error("rank " + std::to_string(peer) + " " + why);
}

enum class Direction { send, receive };

// Moves all bytes, or throws.
void move(Mesh& mesh, int peer, Direction direction, std::span<std::byte> bytes, std::int64_t deadline_ns) {
  std::vector<pollfd> fds;
  bool is_flushed = direction == Direction::receive;
  while (!bytes.empty() || !is_flushed) {
    bool moved = false;
    if (!bytes.empty()) {
      const iovec piece{bytes.data(), bytes.size()};
      const auto io = direction == Direction::send ? mesh.send(peer, {&piece, 1}) : mesh.receive(peer, {&piece, 1});
      if (io.closed) fail(peer, "closed its connection");
      bytes = bytes.subspan(io.bytes);
      moved = io.bytes > 0;
    }
    if (direction == Direction::send) is_flushed = mesh.flush();
    if (moved || (bytes.empty() && is_flushed)) continue;
    if (mesh.rail(peer, 0)->is_broken()) fail(peer, "closed its connection");
    const std::int64_t left_ms = (deadline_ns - now_ns()) / 1'000'000;
    if (left_ms <= 0) fail(peer, "did not answer in time");
    fds.clear();
    mesh.wait_for(peer, direction == Direction::send ? POLLOUT : POLLIN, fds);
    mesh.wait_to_flush(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<std::int64_t>(left_ms, 100)));
  }
}

void send_sized(Mesh& mesh, int peer, std::span<const std::byte> bytes, std::int64_t deadline_ns) {
  if (bytes.size() > RankConnections::kMostBytes)
    fail(peer, "would get " + std::to_string(bytes.size()) + " bytes, which are too many");
  auto size = static_cast<std::uint32_t>(bytes.size());
  move(mesh, peer, Direction::send, std::as_writable_bytes(std::span(&size, 1)), deadline_ns);
  move(mesh, peer, Direction::send, {const_cast<std::byte*>(bytes.data()), bytes.size()}, deadline_ns);
}

std::vector<std::byte> receive_sized(Mesh& mesh, int peer, std::int64_t deadline_ns) {
  std::uint32_t size = 0;
  move(mesh, peer, Direction::receive, std::as_writable_bytes(std::span(&size, 1)), deadline_ns);
  if (size > RankConnections::kMostBytes) fail(peer, "sends " + std::to_string(size) + " bytes, which are too many");
  std::vector<std::byte> bytes(size);
  move(mesh, peer, Direction::receive, bytes, deadline_ns);
  return bytes;
}

// Travels whole, so that its size is known.
struct Report {
  std::int64_t after_ns = 0;
  std::uint32_t bytes = 0;
  std::array<char, 500> text{};

  explicit Report(const std::string& what = {}, std::int64_t after = 0)
      : after_ns(after), bytes(static_cast<std::uint32_t>(std::min(what.size(), text.size()))) {
    std::memcpy(text.data(), what.data(), bytes);
  }
  std::string what() const { return {text.data(), std::min<std::size_t>(bytes, text.size())}; }
};
static_assert(sizeof(Report) == 512);

std::span<std::byte> bytes_of(Report& report) { return std::as_writable_bytes(std::span(&report, 1)); }

}  // namespace

void MemberLinks::add(std::shared_ptr<MemberLink> link, const Handle& peer) {
  Endpoint::instance().watch(link, peer);
  links_.push_back(std::move(link));
}

void MemberLinks::serve(const std::shared_ptr<engine::Group>& group) const {
  for (const auto& each : links_) each->serve(group);
}

void MemberLinks::clear() {
  for (const auto& each : links_) Endpoint::instance().forget(*each);
  links_.clear();
}

RankConnections RankConnections::connect(Listener& listener, std::span<const Handle> handles, int rank,
                                         std::int64_t deadline_ns) {
  const int size = static_cast<int>(handles.size());
  Endpoint& endpoint = Endpoint::instance();
  RankConnections made;
  Purposes pipes;
  for (Pipes& each : pipes) each.resize(handles.size());
  const auto count = [](int lower) -> int { return lower == 0 ? MemberLink::kPurposes : MemberLink::kToFirst; };
  const auto handle_of = [&](int peer) -> const Handle& { return handles[static_cast<std::size_t>(peer)]; };
  for (int peer = 0; peer < size; ++peer) {
    try {
      require_own(handle_of(peer));
    } catch (const std::runtime_error& error) {
      fail(peer, std::string("cannot take part: ") + error.what());
    }
  }
  for (int peer = 0; peer < rank; ++peer) {
    try {
      add(pipes, peer, true, endpoint.join(handle_of(peer), rank, count(peer), deadline_ns), handle_of(peer),
          made.links);
    } catch (const std::exception& error) {
      fail(peer, std::string("cannot be reached: ") + error.what());
    }
  }
  const auto is_absent = [&](int peer) { return pipes[MemberLink::kMesh][static_cast<std::size_t>(peer)] == nullptr; };
  for (int missing = size - 1 - rank; missing > 0; --missing) {
    auto member = listener.next_member(deadline_ns);
    if (!member) {
      for (int peer = rank + 1; peer < size; ++peer) {
        if (is_absent(peer)) fail(peer, "did not connect in time");
      }
    }
    if (member->rank <= rank || member->rank >= size || !is_absent(member->rank) ||
        member->connections.sockets.size() != static_cast<std::size_t>(count(rank))) {
      fail(member->rank, "connected as no rank of this communicator does");
    }
    add(pipes, member->rank, false, std::move(member->connections), handle_of(member->rank), made.links);
  }
  const bool is_secured = endpoint.settings().security != auth::Security::none;
  const auto mesh_of = [&](MemberLink::Purpose purpose) {
    return std::make_unique<Mesh>(rank, std::move(pipes[purpose]), std::make_unique<NoPipes>(is_secured));
  };
  made.mesh = mesh_of(MemberLink::kMesh);
  made.to_first = mesh_of(MemberLink::kToFirst);
  made.fallback = mesh_of(MemberLink::kFallback);
  return made;
}

void RankConnections::broadcast(std::span<std::byte> bytes, std::int64_t deadline_ns) {
  if (rank() > 0) return move(*to_first, 0, Direction::receive, bytes, deadline_ns);
  for (int peer = 1; peer < size(); ++peer) move(*to_first, peer, Direction::send, bytes, deadline_ns);
}

std::vector<std::vector<std::byte>> RankConnections::gather(std::vector<std::byte> own, std::int64_t deadline_ns) {
  if (rank() > 0) {
    send_sized(*to_first, 0, own, deadline_ns);
    return {};
  }
  std::vector<std::vector<std::byte>> all{std::move(own)};
  for (int peer = 1; peer < size(); ++peer) all.push_back(receive_sized(*to_first, peer, deadline_ns));
  return all;
}

std::vector<std::byte> RankConnections::scatter(std::span<const std::span<const std::byte>> of_ranks,
                                                std::int64_t deadline_ns) {
  if (rank() > 0) return receive_sized(*to_first, 0, deadline_ns);
  for (int peer = 1; peer < size(); ++peer) {
    send_sized(*to_first, peer, of_ranks[static_cast<std::size_t>(peer)], deadline_ns);
  }
  return {of_ranks[0].begin(), of_ranks[0].end()};
}

std::string RankConnections::first_problem(const std::string& own, std::int64_t began_ns, std::int64_t deadline_ns) {
  const std::string name = "rank " + std::to_string(rank()) + ": ";
  Report first(own.empty() || own.starts_with(name) ? own : name + own, now_ns() - began_ns);
  if (rank() > 0) {
    move(*to_first, 0, Direction::send, bytes_of(first), deadline_ns);
  } else {
    for (int peer = 1; peer < size(); ++peer) {
      Report report;
      move(*to_first, peer, Direction::receive, bytes_of(report), deadline_ns);
      if (report.bytes > 0 && (first.bytes == 0 || report.after_ns < first.after_ns)) first = report;
    }
  }
  broadcast(bytes_of(first), deadline_ns);
  return first.what();
}

}  // namespace netfold::nccl
