// Counts the calls that a mesh makes to its pipes while a driver goes to sleep: mesh_flush RANKS prints them.
#include <netfold/transport/mesh.hpp>

#include <cstdio>
#include <cstdlib>

using namespace netfold::transport;

namespace {

int calls = 0;

class CountingPipe final : public Pipe {
 public:
  Io send(std::span<const iovec> pieces) override {
    left_ += pieces[0].iov_len;
    return {.bytes = pieces[0].iov_len};
  }
  Io receive(std::span<const iovec>) override { return {}; }
  void wait_for(short, std::vector<pollfd>&) const override {}
  bool hung_up() override { return false; }
  std::size_t unconfirmed() const override { return 0; }
  bool flush() override {
    ++calls;
    if (left_ > 0) --left_;
    return left_ == 0;
  }
  void wait_to_flush(std::vector<pollfd>& fds) override {
    ++calls;
    if (left_ > 0) fds.push_back({0, POLLOUT, 0});
  }
  bool shows_bytes() const override { return true; }

 private:
  std::size_t left_ = 0;
};

}  // namespace

int main(int, char** arguments) {
  const int ranks = std::atoi(arguments[1]);
  std::vector<std::unique_ptr<Pipe>> pipes(static_cast<std::size_t>(ranks));
  for (int rank = 1; rank < ranks; ++rank) pipes[static_cast<std::size_t>(rank)] = std::make_unique<CountingPipe>();
  Mesh mesh(0, std::move(pipes), nullptr);
  std::vector<pollfd> fds;
  mesh.wait_to_flush(fds);  // each pipe once, since it may have had something to flush from the start
  calls = 0;
  std::byte bytes[2]{};
  const iovec piece{bytes, sizeof bytes};
  mesh.send(ranks - 1, {&piece, 1});
  for (int sleep = 0; sleep < 10; ++sleep) {
    fds.clear();
    mesh.wait_to_flush(fds);
    if (fds.size() != (sleep == 0 ? 1 : 0)) return 1;
  }
  std::printf("%d\n", calls);
}
