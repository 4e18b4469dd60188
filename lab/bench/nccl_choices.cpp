// The network part of NCCL's all_reduce over the plugin: ring and double binary tree, with LL, LL128 and Simple.
// lab/bench/nccl_choices.py compiles this program, starts one a host, and reads what all ranks print.
//
// The pieces, slots and outstanding requests are those of NCCL 2.3x (enqueue.cc, calcCollChunking; device/all_reduce.h;
// graph/trees.cc; transport/net.cc). A core adds where a GPU would. What a protocol costs on a GPU is not in it.
//
//   nccl_choices run PLUGIN FOLDER RANK SIZE ROUNDS CASE [CASE ...]
//     CASE: BYTES:CALLS:CHOICE,CHOICE...; CHOICE: ring|tree/LL|LL128|Simple/CHANNELS. The choices take turns. Prints
//     CASE ROUND CHOICE, begin and end of its calls in seconds of the machine's clock. Every element is checked.
//   nccl_choices choose TUNER RANKS HOSTS    each line of stdin: bytes, 21 times; prints algorithm, protocol, channels
#include <sched.h>
#include <netfold/nccl/tuner_interface.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "nccl_harness.hpp"

namespace {

constexpr std::size_t kSteps = 8, kMostChannels = 4;

using Net = nccl::NetV11<nccl::PropertiesV12, 8>;

// One direction of a connection, with the slots of its messages.
struct Link {
  void* comm = nullptr;
  bool sends = false;
  std::vector<char> memory;
  std::deque<void*> requests;
  std::size_t posted = 0, completed = 0;

  char* slot(std::size_t number, std::size_t slots, std::size_t bytes) { return &memory[number % slots * bytes]; }
  void post(const Net& net, char* data, std::size_t bytes) {
    void* request = nullptr;
    if (sends) {
      check(net.transfers.send(comm, data, bytes, 0, nullptr, nullptr, &request), "send");
    } else {
      void *into = data, *nothing = nullptr;
      int tag = 0;
      check(net.transfers.receive(comm, 1, &into, &bytes, &tag, &nothing, &nothing, &request), "receive");
    }
    if (request == nullptr) stop("the plugin takes fewer requests than NCCL makes");
    requests.push_back(request);
    ++posted;
  }
  void poll(const Net& net) {
    for (int done = 0; !requests.empty(); ++completed, requests.pop_front()) {
      check(net.completion.test(requests.front(), &done, nullptr), "test");
      if (done == 0) break;
    }
  }
};

struct Protocol {
  const char* name;
  std::size_t step;                // bytes of a slot on the network
  std::size_t line, data_of_line;  // bytes; of which are data
  std::size_t wire(std::size_t bytes) const { return (bytes + data_of_line - 1) / data_of_line * line; }
  std::size_t data() const { return step / line * data_of_line; }
};
constexpr Protocol kProtocols[] = {
    {"LL", 64 << 10, 16, 8}, {"LL128", 120 * 640 * 8, 128, 120}, {"Simple", 512 << 10, 1, 1}};

struct Choice {
  std::string name;
  bool is_tree = false;
  const Protocol* protocol = nullptr;
  std::size_t channels = 1;
};

struct Piece {
  std::size_t begin, count;
  bool receives, adds, keeps, sends;
};

// NCCL's primitives of a channel: pieces in order; each is received from all of `from`, and sent to all of `to`.
class Stream {
 public:
  Stream(const Net& net, std::vector<Link*> from, std::vector<Link*> to, const Protocol& protocol, std::size_t slots,
         std::size_t slot_bytes, std::vector<Piece> pieces)
      : net_(net),
        from_(std::move(from)),
        to_(std::move(to)),
        protocol_(protocol),
        slots_(slots),
        bytes_(slot_bytes),
        pieces_(std::move(pieces)) {
    receives_ = static_cast<std::size_t>(std::ranges::count(pieces_, true, &Piece::receives));
    for (auto* links : {&from_, &to_})
      for (Link* link : *links) {
        link->posted = link->completed = 0;
        link->memory.resize(std::max(link->memory.size(), slots_ * bytes_));
      }
  }
  bool ran() const { return at_ == pieces_.size(); }
  bool finished() const {
    return ran() && std::ranges::all_of(to_, [](const Link* link) { return link->completed == link->posted; });
  }
  bool progress(std::vector<float>& values) {
    for (Link* link : from_) {
      while (link->posted < receives_ && link->posted < received_ + slots_)
        link->post(net_, link->slot(link->posted, slots_, bytes_), bytes_);
      link->poll(net_);
    }
    for (Link* link : to_) link->poll(net_);
    const std::size_t before = at_;
    for (; at_ < pieces_.size() && is_ready(pieces_[at_]); ++at_) run(pieces_[at_], values);
    return at_ != before;
  }

 private:
  bool is_ready(const Piece& piece) const {
    const auto came = [&](const Link* link) { return link->completed > received_; };
    const auto fits = [&](const Link* link) { return link->posted - link->completed < slots_; };
    return (!piece.receives || std::ranges::all_of(from_, came)) && (!piece.sends || std::ranges::all_of(to_, fits));
  }
  void run(const Piece& piece, std::vector<float>& values) {
    float* const own = values.data() + piece.begin;
    const auto slot = [&](Link* link, std::size_t number) {
      return reinterpret_cast<float*>(link->slot(number, slots_, bytes_));
    };
    float* const sum = piece.keeps ? own : slot(to_[0], to_[0]->posted);
    const std::size_t bytes = piece.count * sizeof(float);
    if (!piece.receives || piece.adds) {
      if (sum != own) std::memcpy(sum, own, bytes);
    } else {
      std::memcpy(sum, slot(from_[0], received_), bytes);
    }
    if (piece.adds) {
      for (Link* link : from_) {
        const float* const came = slot(link, received_);
        for (std::size_t i = 0; i < piece.count; ++i) sum[i] += came[i];
      }
    }
    received_ += piece.receives;
    if (!piece.sends) return;
    for (Link* link : to_) {
      float* const out = slot(link, link->posted);
      if (out != sum) std::memcpy(out, sum, bytes);
      link->post(net_, reinterpret_cast<char*>(out), protocol_.wire(bytes));
    }
  }

  const Net& net_;
  std::vector<Link*> from_, to_;
  const Protocol& protocol_;
  std::size_t slots_, bytes_;
  std::vector<Piece> pieces_;
  std::size_t at_ = 0, received_ = 0, receives_ = 0;
};

struct Node {
  int up = -1;
  std::vector<int> down;
};

// Leaves and inner ranks alternate; rank 0 is the root, with one child.
Node binary_tree(int size, int rank) {
  int bit = 1;
  while (bit < size && (bit & rank) == 0) bit <<= 1;
  Node node;
  if (rank == 0) {
    if (size > 1) node.down = {bit >> 1};
    return node;
  }
  node.up = (rank ^ bit) | (bit << 1);
  if (node.up >= size) node.up = rank ^ bit;
  int low = bit >> 1;
  if (low == 0) return node;
  node.down = {rank - low};
  while (low > 0 && rank + low >= size) low >>= 1;
  if (low > 0) node.down.push_back(rank + low);
  return node;
}

// The second tree is the first one's mirror (an even number of ranks), or shifted by one rank.
Node tree_of(std::size_t channel, int size, int rank) {
  if (channel % 2 == 0) return binary_tree(size, rank);
  const auto place = [&](int each) { return size % 2 == 0 ? size - 1 - each : (each + size - 1) % size; };
  const auto back = [&](int each) { return size % 2 == 0 ? size - 1 - each : (each + 1) % size; };
  Node node = binary_tree(size, place(rank));
  if (node.up >= 0) node.up = back(node.up);
  for (int& each : node.down) each = back(each);
  return node;
}

class Fabric {
 public:
  Fabric(const char* plugin, const char* folder, int rank, int size)
      : net(table_of<Net>(plugin, "ncclNetPlugin_v12")), folder_(folder), rank_(rank) {
    void* context = nullptr;
    check(net.init(&context, 1, nullptr, log, nullptr), "init");
    std::vector<std::pair<std::string, void*>> listeners;
    std::vector<std::string> wanted;
    const auto both = [&](const std::string& name, int from, int to) {
      const std::string link = name + "-" + std::to_string(from) + "-" + std::to_string(to);
      if (rank_ == from) wanted.push_back(link);
      if (rank_ != to) return;
      std::vector<char> handle(nccl::kHandleBytes);
      void* listener = nullptr;
      check(net.listen(context, 0, handle.data(), &listener), "listen");
      folder_.write(link, handle);
      listeners.emplace_back(link, listener);
    };
    for (std::size_t channel = 0; channel < kMostChannels; ++channel) {
      const std::string number = std::to_string(channel);
      both("ring" + number, rank, (rank + 1) % size);
      both("ring" + number, (rank + size - 1) % size, rank);
      const Node node = tree_of(channel, size, rank);
      if (node.up >= 0) both("up" + number, rank, node.up), both("down" + number, node.up, rank);
      for (int child : node.down) both("up" + number, child, rank), both("down" + number, rank, child);
    }
    std::map<std::string, std::vector<char>> handles;
    for (const auto& link : wanted) handles[link] = folder_.read(link);
    const double until_s = now_s() + kDeadlineS;
    for (std::size_t open = 0; open < wanted.size() + listeners.size();) {
      if (now_s() > until_s) stop("no connections after 60 s");
      const auto made = [&](const std::string& name, bool sends, auto call) {
        Link& link = links_[name];
        if (link.comm != nullptr) return;
        link.sends = sends;
        call(&link.comm);
        open += link.comm != nullptr;
      };
      for (const auto& name : wanted)
        made(name, true,
             [&](void** to) { check(net.connect(context, 0, handles[name].data(), to, nullptr), "connect"); });
      for (const auto& [name, listener] : listeners)
        made(name, false, [&, at = listener](void** to) { check(net.accept(at, to, nullptr), "accept"); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  Link* link(const std::string& name, std::size_t channel, int from, int to) {
    return &links_.at(name + std::to_string(channel) + "-" + std::to_string(from) + "-" + std::to_string(to));
  }
  const Net& net;

 private:
  const Folder folder_;
  int rank_;
  std::map<std::string, Link> links_;
};

std::size_t over(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t aligned(std::size_t count) { return over(count, 4) * 4; }  // to 16 bytes

void ring_pieces(std::vector<Piece>& to, std::size_t begin, std::size_t count, std::size_t chunk, std::size_t slices,
                 int rank, int size) {
  const auto all = static_cast<std::size_t>(size);
  for (std::size_t at = 0; at < count; at += all * chunk) {
    const std::size_t left = count - at, each = left < all * chunk ? aligned(over(left, all)) : chunk;
    for (int step = 0; step < 2 * size - 1; ++step) {
      const std::size_t offset = static_cast<std::size_t>((rank + 2 * size - 1 - step) % size) * each;
      const std::size_t elements = offset >= left ? 0 : std::min(each, left - offset);
      // A slice of less than 32 KB is not cut further; an empty one is sent, too.
      const std::size_t slice = slices == 1 ? elements : std::max(aligned(over(elements, slices)), std::size_t{8192});
      for (std::size_t i = 0; i < slices; ++i) {
        const std::size_t from = std::min(i * slice, elements);
        to.push_back({begin + at + offset * (elements > 0) + from, std::min(slice, elements - from), step > 0,
                      step > 0 && step < size, step >= size - 1, step < 2 * size - 2});
      }
    }
  }
}

// Seconds of the machine's clock at which this rank had the result.
double all_reduce(Fabric& fabric, const Choice& choice, std::vector<float>& values, int rank, int size) {
  const Protocol& protocol = *choice.protocol;
  const bool is_simple = protocol.line == 1, is_sliced = is_simple && !choice.is_tree;
  const std::size_t slots = is_sliced ? kSteps / 2 : kSteps, slot = protocol.step * (is_sliced ? 2 : 1);
  const std::size_t part = aligned(over(values.size(), choice.channels));
  std::vector<Stream> streams;
  for (std::size_t channel = 0; channel < choice.channels; ++channel) {
    const std::size_t begin = std::min(channel * part, values.size()), count = std::min(part, values.size() - begin);
    if (count == 0) continue;
    std::size_t chunk = protocol.data() * (is_sliced ? 4 : 1);
    if (choice.is_tree && std::string(protocol.name) == "LL128") {
      double steps = 1.1;
      for (int each = size; each > 1; each >>= 1) steps += 1;
      const std::size_t of_channel = values.size() * sizeof(float) / choice.channels;
      while (static_cast<double>(of_channel / chunk) < steps * 64 && chunk > 131072) chunk /= 2;
      while (static_cast<double>(of_channel / chunk) < steps * 16 && chunk > 32768) chunk /= 2;
    }
    chunk = chunk / sizeof(float) / 4 * 4;
    const auto add = [&](std::vector<Link*> from, std::vector<Link*> to, std::vector<Piece> pieces) {
      streams.emplace_back(fabric.net, std::move(from), std::move(to), protocol, slots, slot, std::move(pieces));
    };
    if (!choice.is_tree) {
      std::vector<Piece> pieces;
      ring_pieces(pieces, begin, count, chunk, is_sliced ? 2 : 1, rank, size);
      add({fabric.link("ring", channel, (rank + size - 1) % size, rank)},
          {fabric.link("ring", channel, rank, (rank + 1) % size)}, std::move(pieces));
      continue;
    }
    const Node node = tree_of(channel, size, rank);
    std::vector<Link*> children, to_children, parent, to_parent;
    for (int child : node.down) {
      children.push_back(fabric.link("up", channel, child, rank));
      to_children.push_back(fabric.link("down", channel, rank, child));
    }
    if (node.up >= 0) {
      parent = {fabric.link("down", channel, node.up, rank)};
      to_parent = {fabric.link("up", channel, rank, node.up)};
    }
    std::vector<Piece> up, down;
    const bool is_leaf = children.empty(), is_root = parent.empty();
    for (std::size_t at = 0; at < count; at += chunk) {
      const std::size_t elements = std::min(chunk, count - at);
      if (is_root) {
        up.push_back({begin + at, elements, true, true, true, true});
      } else {
        up.push_back({begin + at, elements, !is_leaf, !is_leaf, false, true});
        down.push_back({begin + at, elements, true, false, true, !is_leaf});
      }
    }
    add(children, is_root ? to_children : to_parent, std::move(up));
    if (!is_root) add(parent, to_children, std::move(down));
  }
  double ended_s = 0;
  for (const double until_s = now_s() + kDeadlineS;;) {
    bool moved = false;
    for (auto& stream : streams) moved |= stream.progress(values);
    if (ended_s == 0 && std::ranges::all_of(streams, &Stream::ran)) ended_s = now_s();
    if (std::ranges::all_of(streams, &Stream::finished)) return ended_s;
    if (now_s() > until_s) stop(choice.name + " did not end in 60 s");
    if (!moved) sched_yield();
  }
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, by);) parts.push_back(part);
  return parts;
}

Choice choice_of(const std::string& name) {
  const auto parts = split(name, '/');
  const auto* protocol = std::ranges::find(kProtocols, parts.at(1), &Protocol::name);
  if (protocol == std::end(kProtocols)) stop("no protocol " + name);
  return {name, parts[0] == "tree", protocol, std::stoul(parts.at(2))};
}

int run(int count, char** words) {
  const int rank = std::atoi(words[4]), size = std::atoi(words[5]), rounds = std::atoi(words[6]);
  Fabric fabric(words[2], words[3], rank, size);
  const Choice barrier = choice_of("ring/LL/1");
  for (int at = 7; at < count; ++at) {
    const auto parts = split(words[at], ':');
    const std::size_t elements = std::stoul(parts.at(0)) / sizeof(float);
    std::vector<Choice> choices;
    for (const auto& name : split(parts.at(2), ',')) choices.push_back(choice_of(name));
    for (int round = -1; round < rounds; ++round) {  // the first warms up
      for (std::size_t turn = 0; turn < choices.size(); ++turn) {
        const Choice& choice = choices[(turn + static_cast<std::size_t>(round + 1)) % choices.size()];
        // One after the other, as a job calls them: a link's burst would carry a small call that follows a pause.
        std::vector<std::vector<float>> calls(std::stoul(parts.at(1)), std::vector<float>(elements));
        for (auto& values : calls) {
          for (std::size_t i = 0; i < elements; ++i)
            values[i] = static_cast<float>((rank + 1) * static_cast<int>(i % 4093 + 1));
        }
        std::vector<float> token(1);
        all_reduce(fabric, barrier, token, rank, size);
        all_reduce(fabric, barrier, token, rank, size);
        const double began_s = now_s();
        double ended_s = 0;
        for (auto& values : calls) ended_s = all_reduce(fabric, choice, values, rank, size);
        for (const auto& values : calls) {
          for (std::size_t i = 0; i < elements; ++i) {
            const auto wanted = static_cast<float>(size * (size + 1) / 2 * static_cast<int>(i % 4093 + 1));
            if (values[i] != wanted) stop(choice.name + ": a wrong sum at " + std::to_string(i));
          }
        }
        if (round >= 0) std::printf("%d %d %s %.9f %.9f\n", at - 7, round, choice.name.c_str(), began_s, ended_s);
      }
    }
  }
  return 0;
}

int choose(char** words) {
  const auto& tuner = table_of<nccl::TunerV6>(words[2], "ncclTunerPlugin_v6");
  void* context = nullptr;
  check(tuner.init(&context, 1, std::stoul(words[3]), std::stoul(words[4]), log, nullptr, nullptr), "init");
  if (context == nullptr) stop("the tuner has no table of this shape");
  for (std::size_t bytes = 0; std::cin >> bytes;) {
    float times[21];
    for (float& each : times) std::cin >> each;
    int channels = 0;
    check(tuner.collective_info(context, 4, bytes, 1, reinterpret_cast<float**>(times), 7, 3, 0, &channels), "info");
    int best = -1;
    for (int i = 0; i < 21; ++i)
      if (times[i] >= 0 && (best < 0 || times[i] < times[best])) best = i;
    std::printf("%s %s %d\n", nccl::kTunedAlgorithms[best / 3], nccl::kTunedProtocols[best % 3], channels);
  }
  check(tuner.finalize(context), "finalize");
  return 0;
}

}  // namespace

int main(int count, char** words) { return std::string(words[1]) == "run" ? run(count, words) : choose(words); }
