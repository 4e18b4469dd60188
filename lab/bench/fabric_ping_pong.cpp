// A ping-pong through a stream of netfold beside a ping-pong of plain libfabric calls, for one provider.
// lab/bench/fabric.py compiles this program and reads its output.
//
// The plain ping-pong has the form of libfabric's own fi_pingpong: one tagged message at a time, from registered memory
// into a posted buffer, both ends polling. Both sides take turns by blocks of messages between the same two processes,
// so both meet the same machine. The figure of a block is the median over its messages of the time there and back: a
// process that takes a core for a short time does not change the median.
//
//   fabric_ping_pong PROVIDER BLOCKS BYTES MESSAGES [BYTES MESSAGES ...]    prints a line a block:
//   bytes, pipe us, plain us
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <netfold/transport/fabric/fabric_pipe.hpp>
#include <netfold/transport/fabric/libfabric.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fabric = netfold::transport::fabric;

namespace {

constexpr const char* kAddress = "127.0.0.1";
constexpr std::size_t kMostBytes = 64 << 20;
constexpr std::size_t kRmaMinBytes = 64 << 10;  // as NETFOLD_RMA_MIN_BYTES is by default

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Exchange set-up data over the socket between both processes.
void send_control(int socket, const void* data, std::size_t bytes) {
  if (::send(socket, data, bytes, 0) != static_cast<ssize_t>(bytes)) std::abort();
}
void receive_control(int socket, void* data, std::size_t bytes) {
  if (::recv(socket, data, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) std::abort();
}
std::vector<std::byte> swap_names(int socket, const std::vector<std::byte>& name) {
  std::size_t bytes = name.size();
  send_control(socket, &bytes, sizeof bytes);
  send_control(socket, name.data(), bytes);
  receive_control(socket, &bytes, sizeof bytes);
  std::vector<std::byte> peer(bytes);
  receive_control(socket, peer.data(), bytes);
  return peer;
}

class Plain {
 public:
  Plain(const std::string& provider, int socket)
      : endpoint_(fabric::open_endpoint(provider, kAddress, 0)), memory_(2 * kMostBytes) {
    if (endpoint_->limits().needs_registration) {
      registration_ = endpoint_->register_memory(memory_.data(), memory_.size(), fabric::Access::messages);
    }
    peer_ = endpoint_->add(swap_names(socket, endpoint_->name()));
  }
  void send(std::size_t bytes) {
    const auto& limits = endpoint_->limits();
    const bool injects = bytes <= limits.inject_bytes;
    for (;;) {
      const auto taken = injects ? endpoint_->inject(peer_, memory_.data(), bytes, 1)
                                 : endpoint_->send(peer_, memory_.data(), bytes, descriptor(), 1, &sending_);
      if (taken == fabric::Endpoint::Taken::yes) break;
      make_progress();
    }
    if (!injects) wait(sent_);
  }
  void post(std::size_t bytes) {
    while (endpoint_->receive(memory_.data() + kMostBytes, bytes, descriptor(), &receiving_) !=
           fabric::Endpoint::Taken::yes) {
      make_progress();
    }
  }
  void receive() { wait(received_); }

 private:
  void* descriptor() const { return registration_ == nullptr ? nullptr : registration_->descriptor(); }
  void make_progress() {
    const std::size_t found = endpoint_->poll({&completion_, 1});
    if (found == 0) return;
    if (completion_.kind == fabric::Completion::Kind::failed) {
      std::fprintf(stderr, "%s\n", completion_.why.c_str());
      std::abort();
    }
    ++(completion_.kind == fabric::Completion::Kind::sent ? sent_ : received_);
  }
  void wait(int& count) {
    while (count == 0) make_progress();
    --count;
  }

  std::unique_ptr<fabric::Endpoint> endpoint_;
  std::vector<std::byte> memory_;
  std::unique_ptr<fabric::Registration> registration_;
  fabric::Endpoint::Peer peer_ = 0;
  fabric::Work sending_, receiving_;
  fabric::Completion completion_;
  int sent_ = 0;
  int received_ = 0;
};

// The connection beside the stream.
class SocketPipe final : public netfold::transport::Pipe {
 public:
  explicit SocketPipe(int socket) : socket_(socket) {}
  ~SocketPipe() override { close(socket_); }
  Io send(std::span<const iovec> pieces) override {
    const ssize_t sent = ::send(socket_, pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    return {.bytes = static_cast<std::size_t>(std::max<ssize_t>(sent, 0))};
  }
  Io receive(std::span<const iovec> pieces) override {
    const ssize_t received = ::recv(socket_, pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT);
    return {.bytes = static_cast<std::size_t>(std::max<ssize_t>(received, 0)), .closed = received == 0};
  }
  void wait_for(short, std::vector<pollfd>&) const override {}
  bool hung_up() override { return false; }
  std::size_t unconfirmed() const override { return 0; }

 private:
  int socket_;
};

class Piped {
 public:
  Piped(const std::string& provider, int socket) : memory_(2 * kMostBytes) {
    std::vector<std::unique_ptr<fabric::Endpoint>> rails;
    rails.push_back(fabric::open_endpoint(provider, kAddress, 0));
    auto lane = std::make_shared<fabric::FabricLane>();
    lane->mux = std::make_shared<fabric::StreamMux>(std::move(rails));
    lane->doorbell = std::make_shared<fabric::Doorbell>();
    lane->rma_min_bytes = kRmaMinBytes;
    pipe_ = std::make_unique<fabric::FabricPipe>(std::move(lane), 1, std::make_unique<SocketPipe>(socket));
  }
  // Large messages go as chunks do: by RMA from where they are into the posted buffer.
  void send(std::size_t bytes) {
    if (!pipe_->uses_rma(bytes)) return move(memory_.data(), bytes, true);
    const iovec piece{memory_.data(), bytes};
    while (check(pipe_->put({&piece, 1}, sent_)) == 0) {
    }
    ++sent_;
  }
  // Post the buffer ahead, as the plain side does.
  void post(std::size_t bytes) {
    if (!pipe_->uses_rma(bytes)) return;
    pipe_->post_receive(expected_++, memory_.data() + kMostBytes, bytes);
    check(pipe_->receive({}));
  }
  void receive(std::size_t bytes) { move(memory_.data() + kMostBytes, bytes, false); }
  void wait_until_back() {
    while (pipe_->bytes_in_flight() > 0) {
    }
  }

 private:
  static std::size_t check(const fabric::FabricPipe::Io& io) {
    if (io.closed) std::abort();
    return io.bytes;
  }
  void move(std::byte* data, std::size_t bytes, bool sends) {
    while (bytes > 0) {
      const iovec piece{data, bytes};
      const std::size_t moved = check(sends ? pipe_->send({&piece, 1}) : pipe_->receive({&piece, 1}));
      data += moved;
      bytes -= moved;
    }
  }
  std::uint64_t sent_ = 0;
  std::uint64_t expected_ = 0;
  std::vector<std::byte> memory_;
  std::unique_ptr<fabric::FabricPipe> pipe_;
};

template <class Round>
double median_us(int messages, Round round) {
  std::vector<double> times;
  for (int i = 0; i < messages; ++i) {
    const std::int64_t began = now_ns();
    round();
    times.push_back(static_cast<double>(now_ns() - began) / 2e3);
  }
  std::nth_element(times.begin(), times.begin() + messages / 2, times.end());
  return times[static_cast<std::size_t>(messages / 2)];
}

// socket: of set-up data. connection: beside the stream.
void play(int argc, char** argv, int socket, int connection, bool begins) {
  cpu_set_t all;
  sched_getaffinity(0, sizeof all, &all);
  std::vector<std::size_t> cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  }
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(cores[begins ? 0 : 1 % cores.size()], &own);
  sched_setaffinity(0, sizeof own, &own);
  Plain plain(argv[1], socket);
  Piped piped(argv[1], connection);
  const int blocks = std::atoi(argv[2]);
  for (int given = 3; given + 1 < argc; given += 2) {
    const auto bytes = static_cast<std::size_t>(std::atoll(argv[given]));
    const int messages = std::atoi(argv[given + 1]);
    for (int block = -1; block < blocks; ++block) {
      double plain_us = 0;
      double piped_us = 0;
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn + block) % 2 == 0) {
          plain.post(bytes);
          std::byte ready{};  // the first buffer is posted at both ends
          send_control(socket, &ready, 1);
          receive_control(socket, &ready, 1);
          plain_us = median_us(messages, [&] {
            if (begins) plain.send(bytes);
            plain.receive();
            plain.post(bytes);
            if (!begins) plain.send(bytes);
          });
          // One more message each way uses the buffer that is still posted.
          plain.send(bytes);
          plain.receive();
        } else {
          piped.post(bytes);
          piped_us = median_us(messages, [&] {
            if (begins) piped.send(bytes);
            piped.receive(bytes);
            if (!begins) piped.send(bytes);
            piped.post(bytes);
            piped.wait_until_back();
          });
          piped.send(bytes);
          piped.receive(bytes);
          piped.wait_until_back();
        }
      }
      if (begins && block >= 0) std::printf("%zu %.3f %.3f\n", bytes, piped_us, plain_us);
    }
  }
  std::fflush(stdout);
  std::byte over{};  // neither process ends before the other is done
  send_control(socket, &over, 1);
  receive_control(socket, &over, 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  int sockets[2];
  int connections[2];
  for (int* pair : {sockets, connections}) {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 1;
  }
  const pid_t child = fork();
  const int end = child == 0 ? 1 : 0;
  play(argc, argv, sockets[end], connections[end], child != 0);
  if (child == 0) return 0;
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
