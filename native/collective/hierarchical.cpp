#include <netfold/collective/direct.hpp>
#include <netfold/collective/hierarchical.hpp>

#include <algorithm>
#include <map>

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
  inside_ = hosts_[numbers.at(paths.nodes[static_cast<std::size_t>(paths.mesh.rank())])].size();
  const bool even = std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host.size() == inside_; });
  if (even && call.between != AlgorithmId::in_network) rails_ = inside_;
  begin(Stage::fold_inside);
}

Call Hierarchical::step(Kind kind, AlgorithmId algorithm) const {
  Call step = call_;
  step.kind = kind;
  step.algorithm = algorithm;
  step.root = 0;
  step.average = false;
  step.inputs.clear();
  step.outputs.clear();
  if (algorithm == AlgorithmId::shared_memory) step.wire = step.dtype;
  return step;
}

// The tensor, cut for the rails: sizes differ by one element at most.
std::vector<Buffer> Hierarchical::parts() const {
  const std::size_t bytes = kernels::element_bytes(call_.dtype);
  const std::size_t count = call_.elements();
  std::vector<Buffer> parts;
  std::size_t first = 0;
  for (std::size_t rail = 0; rail < rails_; ++rail) {
    const std::size_t some = count / rails_ + (rail < count % rails_ ? 1 : 0);
    parts.push_back({call_.outputs[0].data + first * bytes, some * bytes});
    first += some;
  }
  return parts;
}

void Hierarchical::begin(Stage stage) {
  stage_ = stage;
  step_.reset();
  const std::vector<Buffer> all = parts();
  const bool speaks = has_rails() || position_ == 0;
  const Buffer mine = all[has_rails() ? static_cast<std::size_t>(position_) : 0];
  switch (stage) {
    case Stage::fold_inside:
      if (inside_ == 1) return;
      step_call_ = step(has_rails() ? Kind::reduce_scatter : Kind::reduce, AlgorithmId::shared_memory);
      if (has_rails()) step_call_.inputs = all;
      step_call_.outputs = {mine};
      step_ = make_algorithm(step_call_, paths_);
      return;
    case Stage::between: {
      if (!speaks) return;
      step_call_ = step(Kind::all_reduce, call_.between);
      step_call_.outputs = {mine};
      std::vector<int> team;
      for (const auto& host : hosts_) team.push_back(host[static_cast<std::size_t>(position_)]);
      step_ = make_algorithm(step_call_, paths_, Team(std::move(team), paths_.mesh.rank()));
      return;
    }
    case Stage::copy_inside:
      if (call_.average && speaks) divide(call_.dtype, mine, paths_.mesh.size());
      if (inside_ == 1) return;
      step_call_ = step(has_rails() ? Kind::all_gather : Kind::broadcast, AlgorithmId::shared_memory);
      if (has_rails()) step_call_.inputs = {mine};
      step_call_.outputs = has_rails() ? all : std::vector<Buffer>{mine};
      step_ = make_algorithm(step_call_, paths_);
      return;
    case Stage::done:
      return;
  }
}

Progress Hierarchical::poll(std::int64_t now_ns) {
  bool moved = false;
  while (stage_ != Stage::done) {
    if (step_ != nullptr) {
      const Progress progress = step_->poll(now_ns);
      if (progress == Progress::failed) return fail(step_->failure());
      if (progress != Progress::done) return moved ? Progress::moved : progress;
      wire_bytes_ += step_->wire_bytes();
      retransmissions_ += step_->retransmissions();
      if (step_->slowest_rank() >= 0) slowest_rank_ = step_->slowest_rank();
    }
    moved = true;
    begin(static_cast<Stage>(static_cast<int>(stage_) + 1));
  }
  return Progress::done;
}

void Hierarchical::wait_for(WaitSet& set) const {
  if (step_ != nullptr) step_->wait_for(set);
}

std::vector<int> Hierarchical::awaited() const { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

// Whoever is waited for may be waiting for another host; but not at the beginning, inside this one.
bool Hierarchical::awaited_may_wait() const {
  return stage_ != Stage::fold_inside || step_ == nullptr || step_->awaited_may_wait();
}

}  // namespace netfold::collective
