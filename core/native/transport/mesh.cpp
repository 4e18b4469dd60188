#include <netfold/transport/mesh.hpp>

#include <algorithm>

namespace netfold::transport {
namespace {

// Whether to read from a pipe makes no connection again: an idle connection that was closed stays closed.
bool is_up(Pipe& pipe) {
  for (int number = 0; number < pipe.rails(); ++number) {
    const ResumableSocket& rail = *pipe.rail(number);
    if (rail.is_released() || (rail.is_broken() && !rail.has_unread())) return false;
  }
  return true;
}

}  // namespace

Mesh::Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes, std::unique_ptr<PipeMaker> maker)
    : rank_(rank),
      maker_(std::move(maker)),
      pipes_(std::move(pipes)),
      is_unflushed_(pipes_.size()),
      positions_(pipes_.size()),
      ahead_(pipes_.size()),
      has_closed_(pipes_.size()) {
  for (int peer = 0; peer < size(); ++peer) {
    if (is_made(peer)) add(peer, std::move(pipes_[static_cast<std::size_t>(peer)]));
  }
}

std::unique_ptr<Pipe> Mesh::new_pipe(int peer) const {
  auto pipe = maker_->make(peer);
  return wrap_ ? wrap_(peer, std::move(pipe)) : std::move(pipe);
}

void Mesh::add(int peer, std::unique_ptr<Pipe> pipe) const {
  made_.push_back(pipe.get());
  pipes_[static_cast<std::size_t>(peer)] = std::move(pipe);
  used(peer);
}

Pipe& Mesh::used(int peer) const {
  Pipe& to_use = pipe(peer);
  const auto index = static_cast<std::size_t>(peer);
  if (!is_unflushed_[index]) {
    unflushed_.push_back(peer);
    is_unflushed_[index] = true;
  }
  return to_use;
}

void Mesh::wrap(std::function<std::unique_ptr<Pipe>(int, std::unique_ptr<Pipe>)> wrap) {
  made_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (is_made(peer)) add(peer, wrap(peer, std::move(pipes_[static_cast<std::size_t>(peer)])));
  }
  wrap_ = std::move(wrap);
}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

std::span<const std::byte> Mesh::peek(int peer, std::size_t most) {
  auto& ahead = ahead_[static_cast<std::size_t>(peer)];
  const std::size_t before = ahead.size();
  if (before < most && leads_to(peer) && is_up(pipe(peer))) {
    ahead.resize(most);
    const iovec rest{ahead.data() + before, most - before};
    const Io io = pipe(peer).receive({&rest, 1});
    ahead.resize(before + io.bytes);
    has_closed_[static_cast<std::size_t>(peer)] = io.closed;
  }
  return ahead;
}

void Mesh::wait_to_peek(int peer, std::vector<pollfd>& fds) const {
  const auto index = static_cast<std::size_t>(peer);
  if (ahead_[index].empty() && !has_closed_[index] && leads_to(peer)) pipe(peer).wait_for(POLLIN, fds);
}

Mesh::Io Mesh::receive_ahead(int peer, std::span<const iovec> pieces) {
  auto& ahead = ahead_[static_cast<std::size_t>(peer)];
  const std::size_t bytes = IovecCursor(pieces).copy_from(ahead.data(), ahead.size());
  ahead.erase(ahead.begin(), ahead.begin() + static_cast<std::ptrdiff_t>(bytes));
  return {.bytes = bytes};
}

ResumableSocket* Mesh::rail(int peer, int number) {
  if (peer < 0 || peer >= size() || !leads_to(peer) || number < 0 || number >= pipe(peer).rails()) return nullptr;
  return used(peer).rail(number);  // the caller may give it a socket, which it sends to
}

std::vector<int> Mesh::made() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_made(peer)) peers.push_back(peer);
  }
  return peers;
}

bool Mesh::has_unsent() { return std::ranges::any_of(made_, &Pipe::has_unsent); }

void Mesh::cancel(std::int64_t most_ns) {
  const std::int64_t deadline_ns = now_ns() + most_ns;
  std::vector<pollfd> fds;
  for (;;) {
    bool is_done = true;
    fds.clear();
    for (Pipe* pipe : made_) {
      if (pipe->cancel()) continue;
      is_done = false;
      if (now_ns() < deadline_ns && !pipe->must_force_close()) {
        pipe->wait_for(0, fds);
      } else {
        pipe->force_close();
      }
    }
    if (is_done) return;
    if (!fds.empty()) ::poll(fds.data(), fds.size(), 1);
  }
}

bool Mesh::flush() {
  bool is_done = true;
  for (Pipe* pipe : made_) is_done &= pipe->flush();
  return is_done;
}

void Mesh::wait_to_flush(std::vector<pollfd>& fds) {
  std::erase_if(unflushed_, [&](int peer) {
    Pipe& each = pipe(peer);
    // Another stream's progress may give a fabric's stream something to flush, so that such a pipe stays.
    const bool is_flushed = each.shows_bytes() && each.flush();
    if (is_flushed) {
      is_unflushed_[static_cast<std::size_t>(peer)] = false;
    } else {
      each.wait_to_flush(fds);
    }
    return is_flushed;
  });
}

void Mesh::close() {
  closed_ = true;
  made_.clear();
  unflushed_.clear();
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
