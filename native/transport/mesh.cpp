#include <netfold/transport/mesh.hpp>

namespace netfold::transport {

Mesh::Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes)
    : rank_(rank), pipes_(std::move(pipes)), positions_(pipes_.size()) {}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

ResumableSocket* Mesh::rail(int peer, int number) {
  if (peer < 0 || peer >= size() || !leads_to(peer) || number < 0 || number >= pipe(peer).rails()) return nullptr;
  return pipe(peer).rail(number);
}

bool Mesh::prefers_large_chunks() const {
  return any([](const Pipe& pipe) { return pipe.prefers_large_chunks(); });
}

bool Mesh::needs_progress() const {
  return any([](const Pipe& pipe) { return pipe.needs_progress(); });
}

bool Mesh::has_unsent() {
  return any([](Pipe& pipe) { return pipe.has_unsent(); });
}

Pipe::RegistrationLease Mesh::lease(std::byte* data, std::size_t bytes) {
  for (const auto& pipe : pipes_) {
    if (pipe == nullptr) continue;
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
    for (const auto& pipe : pipes_) {
      if (pipe == nullptr || pipe->cancel()) continue;
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
  for (const auto& pipe : pipes_) is_done &= pipe == nullptr || pipe->flush();
  return is_done;
}

void Mesh::wait_to_flush(std::vector<pollfd>& fds) {
  for (const auto& pipe : pipes_) {
    if (pipe != nullptr) pipe->wait_to_flush(fds);
  }
}

void Mesh::close() {
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
