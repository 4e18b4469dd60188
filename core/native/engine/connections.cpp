// A group's connections and switch paths: tasks that other threads give to the driver.
#include <poll.h>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

#include "sleep.hpp"

namespace netfold::engine {

void Group::run_driver_task(std::function<void()> action) {
  // The calling thread gets the exception; the driver does not.
  std::packaged_task<void()> task(std::move(action));
  auto done = task.get_future();
  post_driver_task([&task] { task(); });
  done.get();
}

void Group::post_driver_task(std::function<void()> action) {
  auto inbox = inbox_.lock();
  if (inbox->driver != Driver::none) {
    inbox->tasks.push_back(std::move(action));
    signal(wake_);
    return;
  }
  inbox->driver = Driver::caller;
  inbox.unlock();
  action();
  inbox.lock();
  inbox_.release_driver(inbox);
  const bool more = has_work(inbox.state);
  inbox.unlock();
  if (more) engine_.wake();
}

transport::Mesh& Group::mesh_of(int lane) {
  if (lane == 0) return *mesh_;
  return lane == 1 ? transfers_.lane().mesh() : *fallback_meshes_.at(static_cast<std::size_t>(lane) - 2);
}

void Group::on_switch_path(std::size_t shard, const std::function<void(collective::SwitchPath&)>& action) {
  run_driver_task([&] {
    if (shard >= switch_paths_.size()) return;  // the group has ended
    action(*switch_paths_[shard]);
    publish_traffic();
    publish_status();
  });
}

std::optional<Group::Broken> Group::broken(int lane, int peer, int rail) {
  std::optional<Broken> state;
  run_driver_task([&] {
    const auto* socket = mesh_of(lane).rail(peer, rail);
    if (socket != nullptr && socket->is_broken()) state = {socket->received(), socket->reconnects()};
  });
  return state;
}

std::optional<Group::Broken> Group::disconnect(int lane, int peer, int rail, int reconnects) {
  // The driver only reads what is there. This thread waits for the peer's last bytes and its end of stream.
  const std::int64_t until_ns = now_ns() + transport::ResumableSocket::kLastNs;
  std::optional<int> disconnected;  // the number of reconnects when this call began to disconnect
  for (;;) {
    transport::Fd readable;
    run_driver_task([&] {
      auto* socket = mesh_of(lane).rail(peer, rail);
      if (socket == nullptr || (reconnects >= -1 && socket->reconnects() > reconnects)) return;
      if (socket->reconnects() != disconnected.value_or(socket->reconnects())) return;
      disconnected = socket->reconnects();
      socket->begin_disconnect();
      if (!socket->is_disconnecting()) return;
      if (socket->drain() || now_ns() >= until_ns) {
        socket->end_disconnect();
        if (socket->has_unread()) {
          connection_changed(lane, peer);
        } else if (lane == 1) {
          transfers_.lane().connection_closed(peer);
        }
        return;
      }
      readable = socket->duplicate_socket();
    });
    if (!readable) return broken(lane, peer, rail);
    const std::int64_t left_ms = (until_ns - now_ns()) / 1'000'000 + 1;
    pollfd more{readable.get(), POLLIN, 0};
    if (left_ms > 0) ::poll(&more, 1, static_cast<int>(left_ms));
  }
}

void Group::set_released(int lane, int peer, int rail, bool is_released) {
  run_driver_task([&] {
    auto* socket = mesh_of(lane).rail(peer, rail);
    if (socket == nullptr) return;
    socket->set_released(is_released);
    if (!is_released) connection_changed(lane, peer);  // its end may have come meanwhile
  });
}

void Group::for_each_connection(const std::function<void(transport::ResumableSocket&, int, int, int)>& visit) {
  run_driver_task([&] {
    for (int lane = 0; lane < 2 + static_cast<int>(fallback_meshes_.size()); ++lane) {
      transport::Mesh& mesh = mesh_of(lane);
      for (const int peer : mesh.made()) {
        int rail = 0;
        for (auto* socket = mesh.rail(peer, rail); socket != nullptr; socket = mesh.rail(peer, ++rail)) {
          visit(*socket, lane, peer, rail);
        }
      }
    }
  });
}

std::vector<Group::Idle> Group::idle_connections() {
  std::vector<Idle> idle;
  for_each_connection([&](transport::ResumableSocket& socket, int lane, int peer, int rail) {
    const std::int64_t since_ns = socket.idle_since_ns();
    if (since_ns >= 0) idle.push_back({since_ns, lane, peer, rail});
  });
  std::ranges::sort(idle, {}, &Idle::since_ns);
  return idle;
}

std::vector<std::array<int, 3>> Group::silent_connections() {
  std::vector<std::array<int, 3>> silent;
  for_each_connection([&](const transport::ResumableSocket& socket, int lane, int peer, int rail) {
    if (socket.is_silent()) silent.push_back({lane, peer, rail});
  });
  return silent;
}

bool Group::reconnect(int lane, int peer, int rail, int reconnects, transport::Fd socket, std::uint64_t peer_received,
                      const auth::StreamSecrets& secrets) {
  bool reconnected = false;
  run_driver_task([&] {
    auto* broken = mesh_of(lane).rail(peer, rail);
    reconnected = broken != nullptr && broken->reconnects() == reconnects &&
                  broken->reconnect(std::move(socket), peer_received, secrets);
    if (reconnected) flush();
    connection_changed(lane, peer);
  });
  return reconnected;
}

void Group::connect(int lane, int peer, int rail, transport::Fd socket, const auth::StreamSecrets& secrets) {
  const auto first = std::make_shared<transport::Fd>(std::move(socket));  // a std::function is copyable
  post_driver_task([=, this] {
    try {
      auto* unused = mesh_of(lane).rail(peer, rail);
      if (unused == nullptr || !unused->is_unused()) return;
      if (unused->reconnect(std::move(*first), 0, secrets)) flush();
      connection_changed(lane, peer);
    } catch (const std::exception& error) {
      fail({collective::Failure::Kind::system, peer,
            "rank " + std::to_string(rank()) + " could not use its connection to rank " + std::to_string(peer) + ": " +
                error.what()});
    }
  });
}

void Group::give_up(int lane, int peer, int rail, int reconnects, const std::string& why, bool is_orderly) {
  run_driver_task([&] {
    auto* socket = mesh_of(lane).rail(peer, rail);
    if (socket == nullptr || !socket->is_broken() || socket->reconnects() != reconnects) return;
    socket->give_up(why, is_orderly);
    connection_changed(lane, peer);
  });
}

void Group::connection_changed(int lane, int peer) {
  if (lane == 1) transfers_.lane().connection_changed(peer);
}

void Group::flush() {
  bool needs_flush = false;
  for_each_mesh([&](transport::Mesh& mesh) { needs_flush |= !mesh.flush(); });
  inbox_.lock()->needs_flush = needs_flush;
}

bool Group::has_unsent() {
  bool unsent = false;
  for_each_mesh([&](transport::Mesh& mesh) { unsent |= mesh.has_unsent(); });
  return unsent;
}

}  // namespace netfold::engine
