#include <netfold/transport/mesh.hpp>

#include <algorithm>

namespace netfold::transport {

Mesh::Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes, Make make)
    : rank_(rank), make_(std::move(make)), pipes_(std::move(pipes)), positions_(pipes_.size()) {
  for (const auto& pipe : pipes_) {
    if (pipe != nullptr) made_.push_back(pipe.get());
  }
}

void Mesh::add(int peer, std::unique_ptr<Pipe> pipe) const {
  made_.push_back(pipe.get());
  pipes_[static_cast<std::size_t>(peer)] = std::move(pipe);
}

void Mesh::wrap(std::function<std::unique_ptr<Pipe>(int, std::unique_ptr<Pipe>)> wrap) {
  made_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (is_made(peer)) add(peer, wrap(peer, std::move(pipes_[static_cast<std::size_t>(peer)])));
  }
  make_ = [wrap = std::move(wrap), make = std::move(make_)](int peer) { return wrap(peer, make(peer)); };
}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

ResumableSocket* Mesh::rail(int peer, int number) {
  if (peer < 0 || peer >= size() || !leads_to(peer) || number < 0 || number >= pipe(peer).rails()) return nullptr;
  return pipe(peer).rail(number);
}

std::vector<int> Mesh::made() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_made(peer)) peers.push_back(peer);
  }
  return peers;
}

bool Mesh::prefers_large_chunks() const { return std::ranges::any_of(made_, &Pipe::prefers_large_chunks); }

bool Mesh::needs_progress() const { return std::ranges::any_of(made_, &Pipe::needs_progress); }

bool Mesh::has_unsent() { return std::ranges::any_of(made_, &Pipe::has_unsent); }

Pipe::RegistrationLease Mesh::lease(std::byte* data, std::size_t bytes) {
  for (Pipe* pipe : made_) {
    if (auto lease = pipe->lease(data, bytes)) return lease;  // all pipes share one StreamMux
  }
  return nullptr;
}

void Mesh::cancel() {
  const std::int64_t deadline_ns = now_ns() + kCancelNs;
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
  for (Pipe* pipe : made_) pipe->wait_to_flush(fds);
}

void Mesh::close() {
  closed_ = true;
  made_.clear();
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
