#include <netfold/transport/mesh.hpp>

namespace netfold::transport {

Mesh::Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes)
    : rank_(rank), pipes_(std::move(pipes)), places_(pipes_.size()) {}

Mesh::Io Mesh::receive(int peer, std::byte* into, std::size_t bytes) {
  const iovec piece{into, bytes};
  return receive(peer, {&piece, 1});
}

void Mesh::close() {
  for (auto& pipe : pipes_) pipe.reset();
}

}  // namespace netfold::transport
