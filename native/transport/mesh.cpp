#include <netfold/transport/mesh.hpp>

#include <algorithm>
#include <chrono>

namespace netfold::transport {

Mesh::Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes)
    : rank_(rank), pipes_(std::move(pipes)), places_(pipes_.size()) {}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

ResumableSocket* Mesh::rail(int peer, int number) {
  if (peer < 0 || peer >= size() || !leads_to(peer) || number < 0 || number >= pipe(peer).rails()) return nullptr;
  return pipe(peer).rail(number);
}

bool Mesh::likes_long_pieces() const {
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->likes_long_pieces(); });
}

std::unique_ptr<Pipe::Hold> Mesh::hold(std::byte* data, std::size_t bytes) {
  for (const auto& pipe : pipes_) {
    if (pipe == nullptr) continue;
    if (auto hold = pipe->hold(data, bytes)) return hold;  // its port is the others' too
  }
  return nullptr;
}

void Mesh::withdraw() {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(kWithdrawNs);
  std::vector<pollfd> fds;
  for (;;) {
    bool is_back = true;
    fds.clear();
    for (const auto& pipe : pipes_) {
      if (pipe == nullptr || pipe->withdraw()) continue;
      is_back = false;
      if (Clock::now() < deadline && !pipe->must_break_off()) {
        pipe->wait_for(0, fds);
      } else {
        pipe->break_off();
      }
    }
    if (is_back) return;
    if (!fds.empty()) ::poll(fds.data(), fds.size(), 1);
  }
}

bool Mesh::catch_up() {
  bool all = true;
  for (const auto& pipe : pipes_) all &= pipe == nullptr || pipe->catch_up();
  return all;
}

void Mesh::wait_to_catch_up(std::vector<pollfd>& fds) {
  for (const auto& pipe : pipes_) {
    if (pipe != nullptr) pipe->wait_to_catch_up(fds);
  }
}

bool Mesh::needs_driving() const {
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->needs_driving(); });
}

bool Mesh::holds_back() const {
  return std::any_of(pipes_.begin(), pipes_.end(),
                     [](const auto& pipe) { return pipe != nullptr && pipe->holds_back(); });
}

void Mesh::close() {
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
