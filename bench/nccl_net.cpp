// The plugin for NCCL beside plain sockets, between the same processes: messages there and back, and all_reduces by a ring
// and by two trees, whose steps are those of NCCL's.
// bench/nccl_net.py compiles this program, starts one a host, and reads what rank 0 prints.
//
// The plugin is loaded and called as NCCL does it. Plain sockets are one TCP connection to the next rank and one from
// the previous, with TCP_NODELAY; they know every size, and send no header. Both sides are polled, and yield the core
// between polls, as NCCL's proxy thread does. They take turns by rounds.
//
//   nccl_net PLUGIN FOLDER RANK SIZE ADDRESS ROUNDS MODE BYTES CALLS [MODE BYTES CALLS ...]
//     MODE: there-and-back (between 2 ranks), ring, tree (all_reduce of f32). Prints a line a round and side:
//     MODE BYTES SIDE, seconds of a call
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>
#include <netfold/nccl/interface.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace nccl = netfold::nccl;

namespace {

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "nccl_net: %s\n", why.c_str());
  std::exit(1);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Files by which ranks tell each other something before there is a connection.
class Folder {
 public:
  Folder(std::string path, int rank) : path_(std::move(path)), rank_(rank) {}
  void write(const std::string& name, const std::vector<char>& what) const {
    const std::string file = path_ + "/" + name + std::to_string(rank_);
    std::ofstream(file + ".new", std::ios::binary).write(what.data(), static_cast<std::streamsize>(what.size()));
    if (std::rename((file + ".new").c_str(), file.c_str()) != 0) stop("cannot write " + file);
  }
  std::vector<char> read(const std::string& name, int rank) const {
    const std::string file = path_ + "/" + name + std::to_string(rank);
    const double until_s = now_s() + 60;
    while (now_s() < until_s) {
      std::ifstream in(file, std::ios::binary);
      if (in) return {std::istreambuf_iterator<char>(in), {}};
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    stop("there was no " + file + " after 60 s");
  }

 private:
  std::string path_;
  int rank_;
};

// A network with a way to one rank and one from another. Pieces of memory go and come in order.
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

void log(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level > nccl::kWarn) return;
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  std::fputc('\n', stderr);
  va_end(values);
}

class PluginNet final : public Net {
 public:
  using Table = nccl::NetV11<nccl::PropertiesV12, 8>;

  // name: of the connections; each rank writes its end under it, and connects to the end of rank `to`.
  PluginNet(const char* plugin, const Folder& folder, const std::string& name, int to) {
    void* library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) stop(dlerror());
    table_ = static_cast<const Table*>(dlsym(library, "ncclNetPlugin_v12"));
    if (table_ == nullptr) stop(dlerror());
    check(table_->init(&context_, 1, nullptr, log, nullptr), "init");
    std::vector<char> handle(nccl::kHandleBytes);
    void* listener = nullptr;
    check(table_->listen(context_, 0, handle.data(), &listener), "listen");
    folder.write("handle" + name, handle);
    auto next = folder.read("handle" + name, to);
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
  void check(nccl::Result result, const char* what) {
    if (result != nccl::Result::success) stop(std::string(what) + " failed");
  }
  std::size_t finished(std::deque<void*>& requests) {
    std::size_t count = 0;
    for (int done = 1; !requests.empty(); ++count, requests.pop_front()) {
      check(table_->completion.test(requests.front(), &done, nullptr), "test");
      if (done == 0) break;
    }
    return count;
  }

  const Table* table_ = nullptr;
  void* context_ = nullptr;
  void* send_ = nullptr;
  void* receive_ = nullptr;
  std::deque<void*> sends_, receives_;
};

class SocketNet final : public Net {
 public:
  SocketNet(const char* host, const Folder& folder, const std::string& name, int to) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) stop("not an address");
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t length = sizeof address;
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener, 1) != 0)
      stop("listen");
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
    const char* raw = reinterpret_cast<const char*>(&address);
    folder.write("socket" + name, {raw, raw + sizeof address});
    const auto next = folder.read("socket" + name, to);
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

// One binary tree over the ranks, or its mirror image, in which inner ranks are leaves. It adds its half of the values on
// the way up, and sends the sum down, in pieces that follow one another.
class Tree {
 public:
  template <class Kind>
  Tree(const Kind*, const char* how, const Folder& folder, int rank, int size, bool is_mirrored) {
    const auto mirrored = [&](int place) { return is_mirrored ? size - 1 - place : place; };
    const int place = mirrored(rank);
    const auto joined = [&](int child, int to) {
      const std::string name = std::string(is_mirrored ? "mirror" : "tree") + std::to_string(child) + "-";
      return std::make_unique<Kind>(how, folder, name, mirrored(to));
    };
    if (place > 0) parent_ = joined(place, (place - 1) / 2);
    for (int child = 2 * place + 1; child < size && child <= 2 * place + 2; ++child) {
      children_.push_back(joined(child, child));
      came_.emplace_back(kPiece * kUnderWay);
    }
  }

  void begin(float* values, std::size_t count) {
    values_ = values;
    count_ = count;
    all_ = (count + kPiece - 1) / kPiece;
    added_ = up_ = down_ = 0;
    expected_.assign(children_.size(), 0);
    returned_.assign(children_.size(), 0);
    for (Net* each : nets()) each->sent = each->received = 0;
  }

  // Moves what can be moved; whether everything is done.
  bool step() {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      for (; expected_[i] < all_ && expected_[i] < added_ + kUnderWay; ++expected_[i]) {
        children_[i]->receive(bytes(&came_[i][expected_[i] % kUnderWay * kPiece]), size_of(expected_[i]));
      }
    }
    for (Net* each : nets()) each->poll();
    while (added_ < all_ && std::ranges::all_of(children_, [&](auto& each) { return each->received > added_; })) {
      for (const auto& came : came_) {
        const float* const from = &came[added_ % kUnderWay * kPiece];
        for (std::size_t i = 0; i < size_of(added_) / sizeof(float); ++i) values_[added_ * kPiece + i] += from[i];
      }
      ++added_;
    }
    if (parent_ != nullptr) {
      for (; up_ < added_ && up_ < parent_->sent + kUnderWay; ++up_) parent_->send(piece(up_), size_of(up_));
      // The sum comes to where the part was, once that has been sent.
      for (; down_ < parent_->sent && down_ < parent_->received + kUnderWay; ++down_) {
        parent_->receive(piece(down_), size_of(down_));
      }
    }
    const std::size_t summed = parent_ == nullptr ? added_ : parent_->received;
    bool is_done = summed == all_;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      for (; returned_[i] < summed && returned_[i] < children_[i]->sent + kUnderWay; ++returned_[i]) {
        children_[i]->send(piece(returned_[i]), size_of(returned_[i]));
      }
      is_done = is_done && children_[i]->sent == all_;
    }
    return is_done;
  }

 private:
  static constexpr std::size_t kPiece = (64 << 10) / sizeof(float), kUnderWay = 8;

  static char* bytes(float* values) { return reinterpret_cast<char*>(values); }
  char* piece(std::size_t number) { return bytes(values_ + number * kPiece); }
  std::size_t size_of(std::size_t number) const { return std::min(kPiece, count_ - number * kPiece) * sizeof(float); }
  std::vector<Net*> nets() {
    std::vector<Net*> all;
    for (auto& each : children_) all.push_back(each.get());
    if (parent_ != nullptr) all.push_back(parent_.get());
    return all;
  }

  std::unique_ptr<Net> parent_;
  std::vector<std::unique_ptr<Net>> children_;
  std::vector<std::vector<float>> came_;  // of each child, kUnderWay pieces
  float* values_ = nullptr;
  std::size_t count_ = 0, all_ = 0, added_ = 0, up_ = 0, down_ = 0;
  std::vector<std::size_t> expected_, returned_;  // pieces of each child
};

void trees(std::vector<Tree>& both, std::vector<float>& values) {
  const std::size_t half = values.size() / 2;
  both[0].begin(values.data(), half);
  both[1].begin(values.data() + half, values.size() - half);
  for (bool is_done = false; !is_done; sched_yield()) {
    is_done = both[0].step();
    is_done = both[1].step() && is_done;
  }
}

// Every rank has come so far.
void meet(Net& sockets, int rank) {
  char token = 0;
  for (int turn = 0; turn < 2; ++turn) there_and_back(sockets, rank, &token, 1);
}

}  // namespace

int main(int count, char** words) {
  const Folder folder(words[2], std::atoi(words[3]));
  const int rank = std::atoi(words[3]), size = std::atoi(words[4]), rounds = std::atoi(words[6]);
  PluginNet plugin(words[1], folder, "", (rank + 1) % size);
  SocketNet sockets(words[5], folder, "", (rank + 1) % size);
  std::vector<Tree> of_plugin, of_sockets;
  for (int at = 7; at + 2 < count && of_plugin.empty(); at += 3) {
    for (const bool is_mirrored : {false, true}) {
      if (words[at] != std::string("tree")) continue;
      of_plugin.emplace_back(&plugin, words[1], folder, rank, size, is_mirrored);
      of_sockets.emplace_back(&sockets, words[5], folder, rank, size, is_mirrored);
    }
  }
  for (int at = 7; at + 2 < count; at += 3) {
    const std::string mode = words[at];
    const auto bytes = static_cast<std::size_t>(std::atoll(words[at + 1]));
    const int calls = std::atoi(words[at + 2]);
    std::vector<char> data(bytes);
    std::vector<float> values(bytes / sizeof(float));
    for (int round = -1; round < rounds; ++round) {  // the first warms up
      for (int turn = 0; turn < 2; ++turn) {
        const bool is_plugin = (turn == 0) == (round % 2 == 0);
        Net& net = is_plugin ? static_cast<Net&>(plugin) : sockets;
        std::fill(values.begin(), values.end(), static_cast<float>(rank + 1));
        meet(sockets, rank);
        std::vector<double> took;
        for (int call = 0; call < calls; ++call) {
          const double began_s = now_s();
          if (mode == "ring") {
            ring(net, rank, size, values);
          } else if (mode == "tree") {
            trees(is_plugin ? of_plugin : of_sockets, values);
          } else {
            there_and_back(net, rank, data.data(), bytes);
          }
          took.push_back(now_s() - began_s);
        }
        if (mode != "there-and-back") {
          float wanted = static_cast<float>(size * (size + 1) / 2);
          for (int call = 1; call < calls; ++call) wanted *= static_cast<float>(size);
          if (std::ranges::any_of(values, [&](float each) { return each != wanted; })) stop("a wrong sum");
        }
        std::ranges::nth_element(took, took.begin() + calls / 2);
        if (rank != 0 || round < 0) continue;
        std::printf("%s %zu %s %.9f\n", mode.c_str(), bytes, is_plugin ? "plugin" : "sockets",
                    took[static_cast<std::size_t>(calls / 2)]);
      }
    }
  }
}
