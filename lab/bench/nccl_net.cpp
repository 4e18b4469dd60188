// The plugin for NCCL beside plain sockets, between the same processes: messages there and back, and a ring's all_reduce.
// lab/bench/nccl_net.py compiles this program, starts one a host, and reads what rank 0 prints.
//
// The plugin is loaded and called as NCCL does it. Plain sockets are one TCP connection to the next rank and one from
// the previous, with TCP_NODELAY; they know every size, and send no header. Both sides are polled, and yield the core
// between polls, as NCCL's proxy thread does. They take turns by rounds.
//
//   nccl_net PLUGIN FOLDER RANK SIZE ADDRESS ROUNDS MODE BYTES CALLS [MODE BYTES CALLS ...]
//     MODE: there-and-back (between 2 ranks), ring (all_reduce of f32), collnet (all_reduce of f32 through the switch
//     that NETFOLD_SWITCH names, beside a ring over the plugin). Prints a line a round and side:
//     MODE BYTES SIDE, seconds of a call, bytes that this host's eth0 sent for it
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "nccl_harness.hpp"

namespace {

// A network with a way to the next rank and one from the previous. Pieces of memory go and come in order.
class Net {
 public:
  virtual ~Net() = default;
  virtual void send(char* data, std::size_t bytes) = 0;
  virtual void receive(char* data, std::size_t bytes) = 0;
  // Moves what can be moved; counts the pieces that are done.
  virtual void poll() = 0;
  std::size_t sent = 0;
  std::size_t received = 0;

  void wait(std::size_t to_send, std::size_t to_receive) {
    for (poll(); sent < to_send || received < to_receive; poll()) sched_yield();
    sent = received = 0;
  }
};

class PluginNet final : public Net {
 public:
  using Table = nccl::NetV11<nccl::PropertiesV12, 8>;

  PluginNet(const char* plugin, const Folder& folder, int rank, int size)
      : table_(&table_of<Table>(plugin, "ncclNetPlugin_v12")) {
    check(table_->init(&context_, 1, nullptr, log, nullptr), "init");
    std::vector<char> handle(nccl::kHandleBytes);
    void* listener = nullptr;
    check(table_->listen(context_, 0, handle.data(), &listener), "listen");
    folder.write("handle" + std::to_string(rank), handle);
    auto next = folder.read("handle" + std::to_string((rank + 1) % size));
    while (send_ == nullptr || receive_ == nullptr) {
      if (send_ == nullptr) check(table_->connect(context_, 0, next.data(), &send_, nullptr), "connect");
      if (receive_ == nullptr) check(table_->accept(listener, &receive_, nullptr), "accept");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void send(char* data, std::size_t bytes) override {
    void* request = nullptr;
    check(table_->transfers.send(send_, data, bytes, 0, nullptr, nullptr, &request), "send");
    if (request == nullptr) stop("the plugin takes fewer requests than NCCL makes");
    sends_.push_back(request);
  }
  void receive(char* data, std::size_t bytes) override {
    void *into = data, *nothing = nullptr, *request = nullptr;
    int tag = 0;
    check(table_->transfers.receive(receive_, 1, &into, &bytes, &tag, &nothing, &nothing, &request), "receive");
    if (request == nullptr) stop("the plugin takes fewer requests than NCCL makes");
    receives_.push_back(request);
  }
  void poll() override {
    sent += finished(sends_);
    received += finished(receives_);
  }

 private:
  std::size_t finished(std::deque<void*>& requests) {
    std::size_t count = 0;
    for (int done = 1; !requests.empty(); ++count, requests.pop_front()) {
      check(table_->completion.test(requests.front(), &done, nullptr), "test");
      if (done == 0) break;
    }
    return count;
  }

  const Table* table_;
  void* context_ = nullptr;
  void* send_ = nullptr;
  void* receive_ = nullptr;
  std::deque<void*> sends_, receives_;
};

class SocketNet final : public Net {
 public:
  SocketNet(const Folder& folder, int rank, int size, const char* host) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) stop("not an address");
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t length = sizeof address;
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener, 1) != 0)
      stop("listen");
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
    const char* raw = reinterpret_cast<const char*>(&address);
    folder.write("socket" + std::to_string(rank), {raw, raw + sizeof address});
    const auto next = folder.read("socket" + std::to_string((rank + 1) % size));
    send_ = socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(send_, reinterpret_cast<const sockaddr*>(next.data()), sizeof address) != 0) stop("connect");
    receive_ = ::accept(listener, nullptr, nullptr);
    const int on = 1;
    setsockopt(send_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  void send(char* data, std::size_t bytes) override { out_.push_back({data, bytes}); }
  void receive(char* data, std::size_t bytes) override { in_.push_back({data, bytes}); }
  void poll() override {
    while (!out_.empty()) {
      if (!advance(out_, ::send(send_, out_.front().data, out_.front().left, MSG_DONTWAIT | MSG_NOSIGNAL))) break;
      ++sent;
    }
    while (!in_.empty()) {
      if (!advance(in_, ::recv(receive_, in_.front().data, in_.front().left, MSG_DONTWAIT))) break;
      ++received;
    }
  }

 private:
  struct Piece {
    char* data;
    std::size_t left;
  };
  // Whether the first piece is done; it is removed then.
  static bool advance(std::deque<Piece>& pieces, ssize_t moved) {
    if (moved < 0 && errno != EAGAIN) stop(std::strerror(errno));
    if (moved <= 0) return false;
    Piece& first = pieces.front();
    first.data += moved;
    first.left -= static_cast<std::size_t>(moved);
    if (first.left > 0) return false;
    pieces.pop_front();
    return true;
  }

  int send_ = -1;
  int receive_ = -1;
  std::deque<Piece> out_, in_;
};

// As NCCL uses it for memory that it did not register: pieces of a buffer go, their sums come to another buffer. NCCL
// polls without a pause, from a thread with a core of its own. Here a few cores serve all hosts, and a poll moves nothing:
// the engine's thread does. So there are pauses between polls.
class CollNet {
 public:
  using Table = nccl::CollNetV11<nccl::PropertiesV12, 8>;

  CollNet(const char* plugin, const Folder& folder, int rank, int size)
      : table_(&table_of<Table>(plugin, "ncclCollNetPlugin_v12")) {
    check(table_->init(&context_, 1, log), "init");
    std::vector<char> handle(nccl::kHandleBytes);
    void* listener = nullptr;
    check(table_->listen(context_, 0, handle.data(), &listener), "listen");
    folder.write("collnet" + std::to_string(rank), handle);
    std::vector<std::vector<char>> all;
    for (int each = 0; each < size; ++each) all.push_back(folder.read("collnet" + std::to_string(each)));
    std::vector<void*> handles;
    for (auto& each : all) handles.push_back(each.data());
    check(table_->collectives.connect(handles.data(), size, rank, listener, &comm_), "connect");
    if (comm_ == nullptr) stop("CollNet was refused");
  }
  ~CollNet() { table_->collectives.close(comm_); }

  void all_reduce(std::vector<float>& values) {
    constexpr std::size_t kPiece = (1 << 20) / sizeof(float), kUnderWay = 8;
    sums_.resize(values.size());
    std::deque<void*> requests;
    for (std::size_t begin = 0; begin < values.size() || !requests.empty();) {
      if (begin < values.size() && requests.size() < kUnderWay) {
        const std::size_t count = std::min(kPiece, values.size() - begin);
        void* request = nullptr;
        check(table_->collectives.all_reduce(comm_, &values[begin], &sums_[begin], count, nccl::DataType::f32,
                                             nccl::Reduction::sum, nullptr, nullptr, &request),
              "all_reduce");
        if (request == nullptr) stop("the plugin takes fewer operations than NCCL makes");
        requests.push_back(request);
        begin += count;
        continue;
      }
      int done = 0;
      check(table_->collectives.test(requests.front(), &done, nullptr), "test");
      if (done != 0)
        requests.pop_front();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
    values.swap(sums_);
  }

 private:
  const Table* table_;
  void* context_ = nullptr;
  void* comm_ = nullptr;
  std::vector<float> sums_;
};

// That eth0 of this network namespace has sent; 0: it has none.
std::size_t sent_bytes() {
  std::ifstream counters("/proc/self/net/dev");
  for (std::string line; std::getline(counters, line);) {
    std::istringstream words(line);
    std::string name;
    std::size_t number = 0;
    words >> name;
    for (int column = 0; column < 9; ++column) words >> number;
    if (name == "eth0:") return number;
  }
  return 0;
}

void there_and_back(Net& net, int rank, char* data, std::size_t bytes) {
  net.receive(data, bytes);
  if (rank == 0) net.send(data, bytes);
  net.wait(rank == 0 ? 1 : 0, 1);
  if (rank == 0) return;
  net.send(data, bytes);
  net.wait(1, 0);
}

// As NCCL runs it: pieces of 512 KB, of which a few are under way each way; a piece goes on once it came and was added.
void ring(Net& net, int rank, int size, std::vector<float>& values) {
  constexpr std::size_t kPiece = (512 << 10) / sizeof(float), kUnderWay = 8;
  static std::vector<float> came(kPiece * kUnderWay);
  const std::size_t part = values.size() / static_cast<std::size_t>(size);
  const std::size_t a_step = (part + kPiece - 1) / kPiece, all = a_step * static_cast<std::size_t>(2 * size - 2);
  struct Place {
    float* data;
    std::size_t count;
    bool adds;
  };
  const auto place = [&](std::size_t number, int ahead) {
    const auto step = static_cast<int>(number / a_step);
    const std::size_t begin = number % a_step * kPiece;
    const auto of = static_cast<std::size_t>((rank - step - ahead + 2 * size) % size);
    return Place{&values[of * part + begin], std::min(kPiece, part - begin), step < size - 1};
  };
  const auto into = [&](std::size_t number) {
    const Place to = place(number, 1);
    return to.adds ? &came[number % kUnderWay * kPiece] : to.data;
  };
  std::size_t sends = 0, receives = 0, added = 0;
  while (net.sent < all || added < all) {
    const std::size_t before = net.sent + added;
    for (; receives < all && receives < added + kUnderWay; ++receives) {
      net.receive(reinterpret_cast<char*>(into(receives)), place(receives, 1).count * sizeof(float));
    }
    for (; sends < all && sends < net.sent + kUnderWay && sends < added + a_step; ++sends) {
      const Place from = place(sends, 0);
      net.send(reinterpret_cast<char*>(from.data), from.count * sizeof(float));
    }
    net.poll();
    for (; added < net.received; ++added) {
      const Place to = place(added, 1);
      const float* const from = into(added);
      for (std::size_t i = 0; to.adds && i < to.count; ++i) to.data[i] += from[i];
    }
    if (net.sent + added == before) sched_yield();
  }
  net.sent = net.received = 0;
}

// Every rank has come so far.
void meet(Net& sockets, int rank) {
  char token = 0;
  for (int turn = 0; turn < 2; ++turn) there_and_back(sockets, rank, &token, 1);
}

}  // namespace

int main(int count, char** words) {
  const Folder folder(words[2]);
  const int rank = std::atoi(words[3]), size = std::atoi(words[4]), rounds = std::atoi(words[6]);
  PluginNet plugin(words[1], folder, rank, size);
  SocketNet sockets(folder, rank, size, words[5]);
  std::unique_ptr<CollNet> through_switch;
  for (int at = 7; at + 2 < count; at += 3) {
    const std::string mode = words[at];
    const auto bytes = static_cast<std::size_t>(std::atoll(words[at + 1]));
    const int calls = std::atoi(words[at + 2]);
    const bool by_switch = mode == "collnet";
    if (by_switch && through_switch == nullptr)
      through_switch = std::make_unique<CollNet>(words[1], folder, rank, size);
    std::vector<char> data(bytes);
    std::vector<float> values(bytes / sizeof(float));
    for (int round = -1; round < rounds; ++round) {  // the first warms up
      for (int turn = 0; turn < 2; ++turn) {
        const bool is_first = (turn == 0) == (round % 2 == 0);
        Net& net = is_first || by_switch ? static_cast<Net&>(plugin) : sockets;
        std::fill(values.begin(), values.end(), static_cast<float>(rank + 1));
        meet(sockets, rank);
        const std::size_t before = sent_bytes();
        std::vector<double> took;
        for (int call = 0; call < calls; ++call) {
          const double began_s = now_s();
          if (mode == "there-and-back") {
            there_and_back(net, rank, data.data(), bytes);
          } else if (by_switch && is_first) {
            through_switch->all_reduce(values);
          } else {
            ring(net, rank, size, values);
          }
          took.push_back(now_s() - began_s);
        }
        if (mode != "there-and-back") {
          float wanted = static_cast<float>(size * (size + 1) / 2);
          for (int call = 1; call < calls; ++call) wanted *= static_cast<float>(size);
          if (std::ranges::any_of(values, [&](float each) { return each != wanted; })) stop("a wrong sum");
        }
        meet(sockets, rank);  // all ranks' bytes are sent
        std::ranges::nth_element(took, took.begin() + calls / 2);
        if (rank != 0 || round < 0) continue;
        const char* const side = by_switch ? (is_first ? "collnet" : "ring") : is_first ? "plugin" : "sockets";
        std::printf("%s %zu %s %.9f %zu\n", mode.c_str(), bytes, side, took[static_cast<std::size_t>(calls / 2)],
                    (sent_bytes() - before) / static_cast<std::size_t>(calls));
      }
    }
  }
}
