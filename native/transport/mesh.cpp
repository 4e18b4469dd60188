#include <netfold/transport/mesh.hpp>

#include <algorithm>
#include <chrono>

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
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->prefers_large_chunks(); });
}

std::unique_ptr<Pipe::RegistrationLease> Mesh::lease(std::byte* data, std::size_t bytes) {
  for (const auto& pipe : pipes_) {
    if (pipe == nullptr) continue;
    if (auto lease = pipe->lease(data, bytes)) return lease;  // its port is the others' too
  }
  return nullptr;
}

void Mesh::cancel() {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(kCancelNs);
  std::vector<pollfd> fds;
  for (;;) {
    bool is_back = true;
    fds.clear();
    for (const auto& pipe : pipes_) {
      if (pipe == nullptr || pipe->cancel()) continue;
      is_back = false;
      if (Clock::now() < deadline && !pipe->must_force_close()) {
        pipe->wait_for(0, fds);
      } else {
        pipe->force_close();
      }
    }
    if (is_back) return;
    if (!fds.empty()) ::poll(fds.data(), fds.size(), 1);
  }
}

bool Mesh::flush() {
  bool all = true;
  for (const auto& pipe : pipes_) all &= pipe == nullptr || pipe->flush();
  return all;
}

void Mesh::wait_to_flush(std::vector<pollfd>& fds) {
  for (const auto& pipe : pipes_) {
    if (pipe != nullptr) pipe->wait_to_flush(fds);
  }
}

bool Mesh::needs_progress() const {
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->needs_progress(); });
}

bool Mesh::has_unsent() const {
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->has_unsent(); });
}

void Mesh::close() {
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
