// Collectives of ranks on several hosts, some of which share memory. Inside a host the data go through memory. Between
// hosts one rank of each host, its leader, exchanges them; in an all_reduce among hosts with equally many ranks every
// rank does. A call is a list of stages, each a call of its own inside the host or among the leaders, by an algorithm
// chosen for that.
//
//   all_reduce      Hosts of L ranks each: reduce-scatter inside (rank p keeps part p), an all_reduce of part p among
//                   the p-th ranks of all hosts, all L of them at once, all-gather inside. A part has 1 KiB or more, so
//                   of a small tensor only the first ranks have one. On uneven hosts, and where a switch adds between
//                   hosts: reduce inside, all_reduce among the leaders, broadcast inside.
//   reduce          Inside, then among the leaders. The root leads its host. Through a switch, which only each host's
//                   first rank joined, the first rank of the root's host passes the result to the root.
//   broadcast       Among the leaders, then inside. The root leads its host. Through a switch the root first sends to
//                   its host.
//   all_gather      Gather inside, all_gather of each host's blocks among the leaders, broadcast inside.
//   reduce_scatter  Reduce inside, reduce_scatter of each host's blocks among the leaders, scatter inside.
//   gather          Sizes inside, so that the leader can allocate its host's blocks; blocks inside; then among the
//                   leaders, each host's sizes before its blocks. The root leads its host.
//   scatter         Each host's sizes among the leaders, then its blocks; inside. The root leads its host.
//   all_to_all      Inside; then every rank with all ranks of other hosts.
//   barrier         Inside, among the leaders, inside.
//
// Steps: those of the algorithm between hosts, and one or two through memory. Bytes sent by a host: as many as that
// algorithm sends among as many ranks as there are hosts (all_to_all: what the host's ranks give to other hosts).
//
// The blocks of a host's ranks travel as one. Where a call's buffers are not laid out in memory host by host, they are
// copied to or from scratch of n bytes. A leader's sums need n bytes of their own (reduce: unless it is the root).
// (Hierarchical collectives: Karonis et al., 2000.)
#include <netfold/collective/call_sequence.hpp>
#include <netfold/collective/message.hpp>
#include <netfold/collective/slice.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "algorithms.hpp"
#include "host_map.hpp"

namespace netfold::collective {
namespace {

constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);
// Of less, a message between hosts costs more than its data.
constexpr std::size_t kLeastPartBytes = 1024;

std::size_t total(const std::vector<std::uint64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

// Buffers of these sizes, one behind the other.
std::vector<Buffer> consecutive(std::byte* memory, std::span<const std::uint64_t> sizes) {
  std::vector<Buffer> buffers;
  for (const std::uint64_t bytes : sizes) {
    buffers.push_back({memory, bytes});
    memory += bytes;
  }
  return buffers;
}

class Hierarchical final : public CallSequence {
 public:
  Hierarchical(const Call& call, const Paths& paths)
      : call_(call), paths_(paths), hosts_(*paths.hosts), team_(hosts_.first_ranks(), hosts_.own()) {
    step_call_.layout = call_.layout;
    plan();
  }

  // An awaited rank may wait for another host, except in a first stage inside this host.
  bool awaited_may_wait() const override {
    const auto is_call = [](const Stage& stage) {
      return stage.action == Action::inside || stage.action == Action::between;
    };
    const auto first = std::find_if(stages_.begin(), stages_.end(), is_call);
    const bool is_first = next_ > 0 && first == stages_.begin() + static_cast<std::ptrdiff_t>(next_ - 1);
    return !is_first || first->action != Action::inside || step_ == nullptr || step_->awaited_may_wait();
  }

 private:
  enum class Action : std::uint8_t { inside, between, copy, plan_rest, unpack };
  struct Stage {
    Action action;
    Kind kind = Kind::barrier;
    int root = 0;  // a position on the host or in the team
    std::vector<Buffer> inputs;
    std::vector<Buffer> outputs;  // copy: of each input
  };

  void plan() {
    switch (call_.kind) {
      case Kind::all_reduce:
        return plan_all_reduce();
      case Kind::reduce:
        return plan_reduce();
      case Kind::broadcast:
        return plan_broadcast();
      case Kind::all_gather:
        return plan_all_gather();
      case Kind::reduce_scatter:
        return plan_reduce_scatter();
      case Kind::gather:
        return plan_gather();
      case Kind::scatter:
        return plan_scatter();
      case Kind::all_to_all:
        return plan_all_to_all();
      default:
        return plan_barrier();
    }
  }

  void plan_all_reduce() {
    const std::size_t ranks = hosts_.own_ranks().size();
    const Buffer& tensor = call_.outputs[0];
    const std::size_t parts_used = std::clamp<std::size_t>(tensor.bytes / kLeastPartBytes, 1, ranks);
    // A switch adds for one rank per host. Otherwise each rank has a part of the tensor to itself.
    if (!hosts_.is_even() || goes_by_switch()) {
      inside(Kind::reduce, 0, {}, {tensor});
      between(Kind::all_reduce, 0, {}, {tensor});
      inside(Kind::broadcast, 0, {}, {tensor});
      return;
    }
    std::vector<std::uint64_t> sizes(ranks, 0);
    for (std::size_t i = 0; i < parts_used; ++i) {
      sizes[i] = (call_.elements() / parts_used + (i < call_.elements() % parts_used ? 1 : 0)) *
                 kernels::element_bytes(call_.dtype);
    }
    const std::vector<Buffer> parts = consecutive(tensor.data, sizes);
    const std::size_t position = hosts_.position();
    team_ = Team(hosts_.counterparts(), hosts_.own());
    inside(Kind::reduce_scatter, 0, parts, {parts[position]});
    // The first ranks always meet, and find out whether all hosts have made the same call.
    if (position < parts_used) between(Kind::all_reduce, 0, {}, {parts[position]});
    inside(Kind::all_gather, 0, {parts[position]}, parts);
  }

  void plan_reduce() {
    choose_leaders();
    const bool is_root = rank() == call_.root;
    Buffer tensor = call_.outputs[0];
    if (is_leader() && !is_root && hosts_.own_ranks().size() > 1) {
      tensor = scratch(tensor.bytes);
      copy({tensor}, {call_.outputs[0]});
    }
    inside(Kind::reduce, leader_inside(), {}, {tensor});
    between(Kind::reduce, root_in_team(), {}, {tensor});
    if (root_is_led()) {
      std::vector<Buffer> blocks(is_leader() ? hosts_.own_ranks().size() : 0);
      if (is_leader()) blocks[hosts_.position(call_.root)] = tensor;
      inside(Kind::scatter, leader_inside(), std::move(blocks), {is_root ? tensor : Buffer{}});
    }
  }

  void plan_broadcast() {
    choose_leaders();
    const Buffer& tensor = call_.outputs[0];
    if (root_is_led()) inside(Kind::broadcast, static_cast<int>(hosts_.position(call_.root)), {}, {tensor});
    between(Kind::broadcast, root_in_team(), {}, {tensor});
    if (!root_is_led()) inside(Kind::broadcast, leader_inside(), {}, {tensor});
  }

  void plan_all_gather() {
    if (call_.layout == 0) step_call_.layout = layout_of(call_.outputs);
    const auto in_place = hosts_.in_place(call_.outputs);
    const HostMap::Blocks blocks = in_place ? *in_place : scratch_for(call_.outputs);
    inside(Kind::gather, 0, {call_.inputs[0]}, hosts_.of_own_host(blocks.of_rank));
    between(Kind::all_gather, 0, {blocks.of_host[hosts_.own()]}, blocks.of_host);
    inside(Kind::broadcast, 0, {}, {blocks.whole});
    if (!in_place) copy(call_.outputs, blocks.of_rank);
  }

  void plan_reduce_scatter() {
    if (call_.layout == 0) step_call_.layout = layout_of(call_.inputs);
    const bool is_shared = hosts_.own_ranks().size() > 1;
    auto given = hosts_.in_place(call_.inputs);
    if (!given || (is_leader() && is_shared)) {  // inputs must not be written
      given = scratch_for(call_.inputs);
      copy(given->of_rank, call_.inputs);
    }
    inside(Kind::reduce, 0, {}, {given->whole});
    between(Kind::reduce_scatter, 0, given->of_host, {is_shared ? given->of_host[hosts_.own()] : call_.outputs[0]});
    if (is_shared) inside(Kind::scatter, 0, hosts_.of_own_host(given->of_rank), {call_.outputs[0]});
  }

  void plan_gather() {
    choose_leaders();
    // The last size is this rank's own; a leader receives its host's sizes before it.
    sizes_.resize(1 + (is_leader() ? hosts_.own_ranks().size() : 0));
    sizes_.back() = call_.inputs[0].bytes;
    std::vector<Buffer> sizes = consecutive(size_table().data, std::vector(sizes_.size(), std::uint64_t{kSizeBytes}));
    const Buffer own = sizes.back();
    sizes.pop_back();
    inside(Kind::gather, leader_inside(), {own}, std::move(sizes));
    if (is_leader()) {
      stages_.push_back({.action = Action::plan_rest});
    } else {
      inside(Kind::gather, leader_inside(), {call_.inputs[0]}, {});
    }
  }

  void plan_scatter() {
    choose_leaders();
    if (rank() == call_.root) {
      std::vector<std::uint64_t> table_bytes;
      for (std::size_t host = 0; host < hosts_.size(); ++host) {
        table_bytes.push_back(hosts_.ranks(host).size() * kSizeBytes);
        for (const int rank : hosts_.ranks(host)) {
          sizes_.push_back(call_.inputs[static_cast<std::size_t>(rank)].bytes);
        }
      }
      const std::vector<Buffer> tables = consecutive(size_table().data, table_bytes);
      auto given = hosts_.in_place(call_.inputs);
      if (!given) {
        given = scratch_for(call_.inputs);
        copy(given->of_rank, call_.inputs);
      }
      between(Kind::scatter, root_in_team(), tables, {tables[hosts_.own()]});
      given->of_host[hosts_.own()] = {};
      between(Kind::scatter, root_in_team(), std::move(given->of_host), {{}});
      inside(Kind::scatter, leader_inside(), hosts_.of_own_host(call_.inputs), {call_.outputs[0]});
    } else if (is_leader()) {
      sizes_.resize(hosts_.own_ranks().size());
      between(Kind::scatter, root_in_team(), {}, {size_table()});
      stages_.push_back({.action = Action::plan_rest});
    } else {
      inside(Kind::scatter, leader_inside(), {}, {call_.outputs[0]});
    }
  }

  void plan_all_to_all() {
    inside(Kind::all_to_all, 0, hosts_.of_own_host(call_.inputs), hosts_.of_own_host(call_.outputs));
    std::vector<Buffer> inputs = call_.inputs;
    std::vector<Buffer> outputs = call_.outputs;
    for (const int rank : hosts_.own_ranks()) {
      inputs[static_cast<std::size_t>(rank)] = outputs[static_cast<std::size_t>(rank)] = {};
    }
    team_ = Team::everyone(paths_.mesh);
    stages_.push_back({Action::between, Kind::all_to_all, 0, std::move(inputs), std::move(outputs)});
  }

  void plan_barrier() {
    inside(Kind::barrier, 0, {}, {});
    between(Kind::barrier, 0, {}, {});
    inside(Kind::barrier, 0, {}, {});
  }

  // The rest of a gather or scatter on a leader, which by then has the sizes of its host's blocks.
  void plan_rest_of_gather() {
    if (rank() == call_.root) {
      std::vector<std::uint64_t> host_bytes(hosts_.size());
      for (std::size_t host = 0; host < hosts_.size(); ++host) {
        if (host == hosts_.own()) continue;
        host_bytes[host] = hosts_.ranks(host).size() * kSizeBytes;
        for (const int rank : hosts_.ranks(host)) {
          host_bytes[host] += call_.outputs[static_cast<std::size_t>(rank)].bytes;
        }
      }
      inside(Kind::gather, leader_inside(), {call_.inputs[0]}, hosts_.of_own_host(call_.outputs));
      between(Kind::gather, root_in_team(), {{}}, consecutive(scratch(total(host_bytes)).data, host_bytes));
      stages_.push_back({.action = Action::unpack});
      return;
    }
    sizes_.pop_back();
    const Buffer table = size_table();
    const Buffer whole = scratch(table.bytes + total(sizes_));
    std::memcpy(whole.data, table.data, table.bytes);
    inside(Kind::gather, leader_inside(), {call_.inputs[0]}, consecutive(whole.data + table.bytes, sizes_));
    between(Kind::gather, root_in_team(), {whole}, {});
  }

  void plan_rest_of_scatter() {
    const Buffer whole = scratch(total(sizes_));
    between(Kind::scatter, root_in_team(), {}, {whole});
    inside(Kind::scatter, leader_inside(), consecutive(whole.data, sizes_), {call_.outputs[0]});
  }

  // At the root of a gather: copies the blocks of other hosts to the outputs, if the sizes are as expected.
  void unpack() {
    std::byte* next = scratch_.get();
    for (std::size_t host = 0; host < hosts_.size(); ++host) {
      if (host == hosts_.own()) continue;
      const std::byte* table = next;
      next += hosts_.ranks(host).size() * kSizeBytes;
      for (const int peer : hosts_.ranks(host)) {
        const Buffer& to = call_.outputs[static_cast<std::size_t>(peer)];
        std::uint64_t bytes = 0;
        std::memcpy(&bytes, table, sizeof bytes);
        table += sizeof bytes;
        if (bytes != to.bytes) {
          failure_ = mismatch(peer, MessageHeader::of(call_, bytes), rank(), MessageHeader::of(call_, to.bytes));
          return;
        }
        copies_.add(to, {next, bytes});
        next += bytes;
      }
    }
  }

  void inside(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs) {
    // A rank alone on its host has nothing to reduce or to share, but its own block must still be copied.
    const bool moves_own = kind == Kind::gather || kind == Kind::scatter || kind == Kind::all_to_all;
    if (hosts_.own_ranks().size() == 1 && !moves_own) return;
    stages_.push_back({Action::inside, kind, root, std::move(inputs), std::move(outputs)});
  }

  // Left out on ranks that are no leaders.
  void between(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs) {
    if (is_leader()) stages_.push_back({Action::between, kind, root, std::move(inputs), std::move(outputs)});
  }

  void copy(std::vector<Buffer> to, std::vector<Buffer> from) {
    stages_.push_back({Action::copy, Kind::barrier, 0, std::move(from), std::move(to)});
  }

  bool start_next() override {
    if (copies_.advance()) return true;
    if (next_ == stages_.size()) return false;
    start(stages_[next_++]);
    return !failure_;
  }

  void start(const Stage& stage) {
    switch (stage.action) {
      case Action::plan_rest:
        return call_.kind == Kind::gather ? plan_rest_of_gather() : plan_rest_of_scatter();
      case Action::unpack:
        return unpack();
      case Action::copy:
        for (std::size_t i = 0; i < stage.inputs.size(); ++i) copies_.add(stage.outputs[i], stage.inputs[i]);
        return;
      case Action::inside:
      case Action::between:
        break;
    }
    const bool is_inside = stage.action == Action::inside;
    const std::uint64_t layout = step_call_.layout;
    step_call_ = call_;
    step_call_.step_of = call_.step();
    step_call_.layout = layout;
    step_call_.kind = stage.kind;
    step_call_.algorithm = is_inside ? AlgorithmId::shared_memory : call_.between;
    step_call_.between = AlgorithmId::local;
    if (is_inside) step_call_.wire = call_.dtype;
    step_call_.root = stage.root;
    step_call_.whole_root = call_.root;
    // A host makes one partial mean of its ranks; the leaders merge these, and divide.
    const bool reduces =
        stage.kind == Kind::all_reduce || stage.kind == Kind::reduce || stage.kind == Kind::reduce_scatter;
    if (!reduces) step_call_.average = Averaging::none;
    if (step_call_.average != Averaging::none && is_inside) step_call_.average = Averaging::partial;
    if (step_call_.average != Averaging::none && !is_inside) step_call_.ranks_in_tensors = hosts_.ranks_beside();
    step_call_.inputs = stage.inputs;
    step_call_.outputs = stage.outputs;
    if (is_inside && hosts_.own_ranks().size() > 1) {
      step_ = make_algorithm(step_call_, paths_);
    } else {
      step_ = make_algorithm(step_call_, paths_, is_inside ? Team(hosts_.own_ranks(), hosts_.position()) : team_);
    }
  }

  int rank() const { return paths_.mesh.rank(); }
  // A switch adds for one rank per host, always the same: the first rank, which joined the switch.
  bool goes_by_switch() const {
    return call_.between == AlgorithmId::in_network || call_.between == AlgorithmId::split;
  }
  // Makes the root the leader of its host, unless the call goes by a switch.
  void choose_leaders() {
    if (!goes_by_switch()) team_ = team_.with(hosts_.host_of(call_.root), call_.root);
  }

  int leader() const { return team_.rank(static_cast<int>(hosts_.own())); }
  bool is_leader() const { return leader() == rank(); }
  // The leader's position on this host.
  int leader_inside() const { return static_cast<int>(hosts_.position(leader())); }
  // The root is on this host, and another rank is the leader.
  bool root_is_led() const { return hosts_.host_of(call_.root) == hosts_.own() && leader() != call_.root; }
  // The team's position of the leader of the root's host.
  int root_in_team() const { return static_cast<int>(hosts_.host_of(call_.root)); }
  HostMap::Blocks scratch_for(const std::vector<Buffer>& buffers) {
    std::size_t bytes = 0;
    for (const Buffer& buffer : buffers) bytes += buffer.bytes;
    return hosts_.laid_out(buffers, scratch(bytes).data);
  }

  Buffer scratch(std::size_t bytes) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    return {scratch_.get(), bytes};
  }

  Buffer size_table() { return {reinterpret_cast<std::byte*>(sizes_.data()), sizes_.size() * sizeof sizes_[0]}; }

  const Call& call_;
  const Paths paths_;
  const HostMap& hosts_;
  Team team_;  // the ranks that exchange between hosts, by host; in an all_to_all all ranks
  std::unique_ptr<std::byte[]> scratch_;
  // Of the blocks of a gather or scatter: this host's, or all at the root of a scatter, by host.
  std::vector<std::uint64_t> sizes_;
  BlockCopies copies_;  // of the stages that began
  std::vector<Stage> stages_;
  std::size_t next_ = 0;  // of the stages
};

}  // namespace

std::shared_ptr<const HostMap> make_host_map(std::span<const int> nodes, int rank) {
  return std::make_shared<HostMap>(nodes, rank);
}

std::unique_ptr<Algorithm> make_hierarchical(const Call& call, const Paths& paths, Team) {
  return std::make_unique<Hierarchical>(call, paths);
}

}  // namespace netfold::collective
