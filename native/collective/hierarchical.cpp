#include <netfold/collective/direct.hpp>
#include <netfold/collective/hierarchical.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

namespace netfold::collective {
Hierarchical::Hierarchical(const Call& call, const Paths& paths) : call_(call), paths_(paths) {
  std::map<int, std::size_t> numbers;
  for (int rank = 0; rank < paths.mesh.size(); ++rank) {
    const auto [entry, is_new] = numbers.try_emplace(paths.nodes[static_cast<std::size_t>(rank)], hosts_.size());
    if (is_new) hosts_.emplace_back();
    std::vector<int>& host = hosts_[entry->second];
    if (rank == paths.mesh.rank()) position_ = static_cast<int>(host.size());
    host.push_back(rank);
  }
  host_ = numbers.at(paths.nodes[static_cast<std::size_t>(paths.mesh.rank())]);
  for (const auto& host : hosts_) team_.push_back(host.front());
  plan();
}

void Hierarchical::plan() {
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

void Hierarchical::plan_all_reduce() {
  const std::vector<int>& host = hosts_[host_];
  const bool even =
      std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& other) { return other.size() == host.size(); });
  const Buffer& tensor = call_.outputs[0];
  // A switch adds for one rank a host; elsewhere every rank has a part of the tensor to itself.
  if (!even || goes_by_switch()) {
    inside(Kind::reduce, 0, {}, {tensor});
    between(Kind::all_reduce, 0, {}, {tensor});
    if (is_leader()) divide_by_ranks(tensor);
    inside(Kind::broadcast, 0, {}, {tensor});
    return;
  }
  const std::size_t bytes = kernels::element_bytes(call_.dtype);
  std::vector<Buffer> parts;
  std::byte* next = tensor.data;
  for (std::size_t i = 0; i < host.size(); ++i) {
    const std::size_t some = call_.elements() / host.size() + (i < call_.elements() % host.size() ? 1 : 0);
    parts.push_back({next, some * bytes});
    next += some * bytes;
  }
  const auto at = static_cast<std::size_t>(position_);
  for (std::size_t h = 0; h < hosts_.size(); ++h) team_[h] = hosts_[h][at];
  inside(Kind::reduce_scatter, 0, parts, {parts[at]});
  between(Kind::all_reduce, 0, {}, {parts[at]});
  divide_by_ranks(parts[at]);
  inside(Kind::all_gather, 0, {parts[at]}, parts);
}

void Hierarchical::plan_reduce() {
  choose_leaders(call_.root);
  Buffer tensor = call_.outputs[0];
  if (is_leader() && paths_.mesh.rank() != call_.root && hosts_[host_].size() > 1) {
    tensor = scratch(tensor.bytes);
    copy({tensor}, {call_.outputs[0]});
  }
  inside(Kind::reduce, leader_inside(), {}, {tensor});
  between(Kind::reduce, root_in_team(), {}, {tensor});
  if (root_is_led()) {
    const bool root = paths_.mesh.rank() == call_.root;
    std::vector<Buffer> blocks(is_leader() ? hosts_[host_].size() : 0);
    if (is_leader()) blocks[position_inside(call_.root)] = tensor;
    inside(Kind::scatter, leader_inside(), std::move(blocks), {root ? tensor : Buffer{}});
  }
  if (paths_.mesh.rank() == call_.root) divide_by_ranks(tensor);
}

void Hierarchical::plan_broadcast() {
  choose_leaders(call_.root);
  const bool root_first = root_is_led();
  if (root_first) inside(Kind::broadcast, static_cast<int>(position_inside(call_.root)), {}, {call_.outputs[0]});
  between(Kind::broadcast, root_in_team(), {}, {call_.outputs[0]});
  if (!root_first) inside(Kind::broadcast, leader_inside(), {}, {call_.outputs[0]});
}

void Hierarchical::plan_all_gather() {
  step_call_.layout = layout_of(call_.outputs);
  const auto in_place = lying_together(call_.outputs);
  const Blocks blocks = in_place ? *in_place : scratch_for(call_.outputs);
  inside(Kind::gather, 0, {call_.inputs[0]}, of_this_host(blocks.of_rank));
  between(Kind::all_gather, 0, {blocks.of_host[host_]}, blocks.of_host);
  inside(Kind::broadcast, 0, {}, {blocks.whole});
  if (!in_place) copy(call_.outputs, blocks.of_rank);
}

void Hierarchical::plan_reduce_scatter() {
  step_call_.layout = layout_of(call_.inputs);
  const bool shares = hosts_[host_].size() > 1;
  auto given = lying_together(call_.inputs);
  if (!given || (is_leader() && shares)) {  // inputs are not ours to write
    given = scratch_for(call_.inputs);
    copy(given->of_rank, call_.inputs);
  }
  inside(Kind::reduce, 0, {}, {given->whole});
  between(Kind::reduce_scatter, 0, given->of_host, {shares ? given->of_host[host_] : call_.outputs[0]});
  if (shares) inside(Kind::scatter, 0, of_this_host(given->of_rank), {call_.outputs[0]});
  divide_by_ranks(call_.outputs[0]);
}

void Hierarchical::plan_gather() {
  choose_leaders(call_.root);
  sizes_.resize(1 + (is_leader() ? hosts_[host_].size() : 0));
  std::vector<Buffer> words = size_words();
  sizes_.back() = call_.inputs[0].bytes;
  const Buffer own = words.back();
  words.pop_back();
  inside(Kind::gather, leader_inside(), {own}, std::move(words));
  if (is_leader()) {
    stages_.push_back({.where = Where::plan_rest});
  } else {
    inside(Kind::gather, leader_inside(), {call_.inputs[0]}, {});
  }
}

void Hierarchical::plan_gathered() {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  if (paths_.mesh.rank() == call_.root) {
    std::vector<Buffer> of_hosts(hosts_.size());
    std::size_t bytes = 0;
    for (std::size_t h = 0; h < hosts_.size(); ++h) {
      if (h == host_) continue;
      of_hosts[h].bytes = hosts_[h].size() * kWord;
      for (const int rank : hosts_[h]) of_hosts[h].bytes += call_.outputs[static_cast<std::size_t>(rank)].bytes;
      bytes += of_hosts[h].bytes;
    }
    std::byte* next = scratch(bytes).data;
    for (Buffer& buffer : of_hosts) {
      buffer.data = next;
      next += buffer.bytes;
    }
    inside(Kind::gather, leader_inside(), {call_.inputs[0]}, of_this_host(call_.outputs));
    between(Kind::gather, root_in_team(), {{}}, std::move(of_hosts));
    stages_.push_back({.where = Where::unpack});
    return;
  }
  const std::size_t count = hosts_[host_].size();
  const Buffer whole = scratch(std::accumulate(sizes_.begin(), sizes_.end() - 1, count * kWord));
  std::memcpy(whole.data, sizes_.data(), count * kWord);
  std::vector<Buffer> blocks;
  std::byte* next = whole.data + count * kWord;
  for (std::size_t i = 0; i < count; ++i) {
    blocks.push_back({next, sizes_[i]});
    next += sizes_[i];
  }
  inside(Kind::gather, leader_inside(), {call_.inputs[0]}, std::move(blocks));
  between(Kind::gather, root_in_team(), {whole}, {});
}

void Hierarchical::unpack() {
  const std::byte* next = scratch_.get();
  for (std::size_t h = 0; h < hosts_.size(); ++h) {
    if (h == host_) continue;
    const std::byte* table = next;
    next += hosts_[h].size() * sizeof(std::uint64_t);
    for (const int rank : hosts_[h]) {
      const Buffer& to = call_.outputs[static_cast<std::size_t>(rank)];
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, table, sizeof bytes);
      table += sizeof bytes;
      if (bytes != to.bytes) {
        failure_ =
            mismatch(rank, MessageHeader::of(call_, bytes), paths_.mesh.rank(), MessageHeader::of(call_, to.bytes));
        return;
      }
      if (bytes > 0) std::memcpy(to.data, next, bytes);
      next += bytes;
    }
  }
}

void Hierarchical::plan_scatter() {
  choose_leaders(call_.root);
  if (paths_.mesh.rank() == call_.root) {
    for (const auto& host : hosts_) {
      for (const int rank : host) sizes_.push_back(call_.inputs[static_cast<std::size_t>(rank)].bytes);
    }
    const std::vector<Buffer> words = size_words();
    std::vector<Buffer> tables;
    std::size_t first = 0;
    for (const auto& host : hosts_) {
      tables.push_back({words[first].data, host.size() * sizeof(std::uint64_t)});
      first += host.size();
    }
    auto given = lying_together(call_.inputs);
    if (!given) {
      given = scratch_for(call_.inputs);
      copy(given->of_rank, call_.inputs);
    }
    between(Kind::scatter, root_in_team(), tables, {tables[host_]});
    given->of_host[host_] = {};
    between(Kind::scatter, root_in_team(), std::move(given->of_host), {{}});
    inside(Kind::scatter, leader_inside(), of_this_host(call_.inputs), {call_.outputs[0]});
  } else if (is_leader()) {
    sizes_.resize(hosts_[host_].size());
    between(Kind::scatter, root_in_team(), {}, {{size_words()[0].data, sizes_.size() * sizeof(std::uint64_t)}});
    stages_.push_back({.where = Where::plan_rest});
  } else {
    inside(Kind::scatter, leader_inside(), {}, {call_.outputs[0]});
  }
}

void Hierarchical::plan_scattered() {
  const Buffer whole = scratch(std::accumulate(sizes_.begin(), sizes_.end(), std::size_t{0}));
  std::vector<Buffer> blocks;
  std::byte* next = whole.data;
  for (const std::uint64_t bytes : sizes_) {
    blocks.push_back({next, bytes});
    next += bytes;
  }
  between(Kind::scatter, root_in_team(), {}, {whole});
  inside(Kind::scatter, leader_inside(), std::move(blocks), {call_.outputs[0]});
}

void Hierarchical::plan_all_to_all() {
  inside(Kind::all_to_all, 0, of_this_host(call_.inputs), of_this_host(call_.outputs));
  std::vector<Buffer> inputs = call_.inputs;
  std::vector<Buffer> outputs = call_.outputs;
  for (const int rank : hosts_[host_])
    inputs[static_cast<std::size_t>(rank)] = outputs[static_cast<std::size_t>(rank)] = {};
  team_.resize(static_cast<std::size_t>(paths_.mesh.size()));
  std::iota(team_.begin(), team_.end(), 0);
  stages_.push_back({Where::between, Kind::all_to_all, 0, std::move(inputs), std::move(outputs)});
}

void Hierarchical::plan_barrier() {
  inside(Kind::barrier, 0, {}, {});
  between(Kind::barrier, 0, {}, {});
  inside(Kind::barrier, 0, {}, {});
}

void Hierarchical::inside(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs) {
  // A rank alone has nothing to add to or to share; its own block still has to come where it belongs.
  const bool moves_own = kind == Kind::gather || kind == Kind::scatter || kind == Kind::all_to_all;
  if (hosts_[host_].size() == 1 && !moves_own) return;
  stages_.push_back({Where::inside, kind, root, std::move(inputs), std::move(outputs)});
}

void Hierarchical::between(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs) {
  if (is_leader()) stages_.push_back({Where::between, kind, root, std::move(inputs), std::move(outputs)});
}

void Hierarchical::copy(std::vector<Buffer> to, std::vector<Buffer> from) {
  stages_.push_back({Where::copy, Kind::barrier, 0, std::move(from), std::move(to)});
}

void Hierarchical::divide_by_ranks(const Buffer& buffer) {
  if (call_.average) stages_.push_back({Where::divide, Kind::barrier, 0, {}, {buffer}});
}

void Hierarchical::choose_leaders(int root) {
  if (!goes_by_switch()) team_[host_of(root)] = root;
}

std::size_t Hierarchical::host_of(int rank) const {
  const auto has_it = [&](const std::vector<int>& host) { return std::ranges::find(host, rank) != host.end(); };
  return static_cast<std::size_t>(std::ranges::find_if(hosts_, has_it) - hosts_.begin());
}

std::size_t Hierarchical::position_inside(int rank) const {
  return static_cast<std::size_t>(std::ranges::find(hosts_[host_], rank) - hosts_[host_].begin());
}

int Hierarchical::leader_inside() const { return static_cast<int>(position_inside(team_[host_])); }

bool Hierarchical::root_is_led() const { return host_of(call_.root) == host_ && team_[host_] != call_.root; }

std::optional<Hierarchical::Blocks> Hierarchical::lying_together(const std::vector<Buffer>& buffers) const {
  Blocks blocks{.of_rank = buffers, .of_host = {}, .whole = {}};
  for (const auto& host : hosts_) {
    std::size_t bytes = 0;
    for (const int rank : host) {
      const Buffer& buffer = buffers[static_cast<std::size_t>(rank)];
      if (buffer.bytes == 0) continue;
      if (blocks.whole.bytes == 0) blocks.whole.data = buffer.data;
      if (blocks.whole.data + blocks.whole.bytes != buffer.data) return std::nullopt;
      blocks.whole.bytes += buffer.bytes;
      bytes += buffer.bytes;
    }
    blocks.of_host.push_back({nullptr, bytes});
  }
  std::byte* next = blocks.whole.data;
  for (Buffer& of_host : blocks.of_host) {
    of_host.data = next;
    next += of_host.bytes;
  }
  return blocks;
}

Hierarchical::Blocks Hierarchical::scratch_for(const std::vector<Buffer>& buffers) {
  Blocks blocks{.of_rank = buffers, .of_host = {}, .whole = {}};
  for (const Buffer& buffer : buffers) blocks.whole.bytes += buffer.bytes;
  blocks.whole = scratch(blocks.whole.bytes);
  std::byte* next = blocks.whole.data;
  for (const auto& host : hosts_) {
    std::byte* const first = next;
    for (const int rank : host) {
      Buffer& buffer = blocks.of_rank[static_cast<std::size_t>(rank)];
      buffer.data = next;
      next += buffer.bytes;
    }
    blocks.of_host.push_back({first, static_cast<std::size_t>(next - first)});
  }
  return blocks;
}

Buffer Hierarchical::scratch(std::size_t bytes) {
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  return {scratch_.get(), bytes};
}

std::vector<Buffer> Hierarchical::of_this_host(const std::vector<Buffer>& of_ranks) const {
  std::vector<Buffer> buffers;
  for (const int rank : hosts_[host_]) buffers.push_back(of_ranks[static_cast<std::size_t>(rank)]);
  return buffers;
}

int Hierarchical::root_in_team() const { return static_cast<int>(host_of(call_.root)); }

std::vector<Buffer> Hierarchical::size_words() {
  std::vector<Buffer> words;
  for (std::uint64_t& size : sizes_) words.push_back({reinterpret_cast<std::byte*>(&size), sizeof size});
  return words;
}

void Hierarchical::start(const Stage& stage) {
  if (stage.where == Where::plan_rest) return call_.kind == Kind::gather ? plan_gathered() : plan_scattered();
  if (stage.where == Where::unpack) return unpack();
  if (stage.where == Where::copy) {
    for (std::size_t i = 0; i < stage.inputs.size(); ++i) copy_block(stage.outputs[i], stage.inputs[i]);
    return;
  }
  if (stage.where == Where::divide) return divide(call_.dtype, stage.outputs[0], paths_.mesh.size());
  const bool is_inside = stage.where == Where::inside;
  const std::uint64_t layout = step_call_.layout;
  step_call_ = call_;
  step_call_.step_of = call_.step();
  step_call_.layout = layout;
  step_call_.kind = stage.kind;
  step_call_.algorithm = is_inside ? AlgorithmId::shared_memory : call_.between;
  step_call_.between = AlgorithmId::local;
  if (is_inside) step_call_.wire = call_.dtype;
  step_call_.root = stage.root;
  step_call_.average = false;
  step_call_.inputs = stage.inputs;
  step_call_.outputs = stage.outputs;
  if (is_inside && hosts_[host_].size() > 1) {
    step_ = make_algorithm(step_call_, paths_);
  } else {
    step_ = make_algorithm(step_call_, paths_, Team(is_inside ? hosts_[host_] : team_, paths_.mesh.rank()));
  }
}

Progress Hierarchical::poll(std::int64_t now_ns) {
  bool moved = false;
  for (;;) {
    if (step_ != nullptr) {
      const Progress progress = step_->poll(now_ns);
      if (progress == Progress::failed) return fail(step_->failure());
      if (progress != Progress::done) return moved ? Progress::moved : progress;
      wire_bytes_ += step_->wire_bytes();
      registrations_ += step_->registrations();
      retransmissions_ += step_->retransmissions();
      if (step_->slowest_rank() >= 0) slowest_rank_ = step_->slowest_rank();
      step_.reset();
    }
    if (next_ == stages_.size()) return Progress::done;
    start(stages_[next_++]);
    if (failure_) return Progress::failed;
    moved = true;
  }
}

void Hierarchical::wait_for(WaitSet& set) const {
  if (step_ != nullptr) step_->wait_for(set);
}

std::vector<int> Hierarchical::awaited() const { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

// Whoever is waited for may be waiting for another host; but not at the beginning, inside this one.
bool Hierarchical::awaited_may_wait() const {
  const auto waits = [](const Stage& stage) { return stage.where == Where::inside || stage.where == Where::between; };
  const auto first = std::find_if(stages_.begin(), stages_.end(), waits);
  const bool at_the_beginning = next_ > 0 && first == stages_.begin() + static_cast<std::ptrdiff_t>(next_ - 1);
  return !at_the_beginning || first->where != Where::inside || step_ == nullptr || step_->awaited_may_wait();
}

}  // namespace netfold::collective
