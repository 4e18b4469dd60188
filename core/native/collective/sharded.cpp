#include <netfold/collective/sharded.hpp>
#include <netfold/kernels/types.hpp>

#include <algorithm>
#include <numeric>

namespace netfold::collective {
namespace {

// The call with the part [first, end) / whole of every block.
Call part_of(const Call& call, std::uint64_t first, std::uint64_t end, std::uint64_t whole) {
  Call cut = call;
  const std::size_t element_bytes = kernels::element_bytes(call.dtype);
  for (auto* blocks : {&cut.inputs, &cut.outputs}) {
    for (Buffer& block : *blocks) {
      const std::size_t elements = block.bytes / element_bytes;
      const std::size_t from = elements * first / whole;
      const std::size_t to = elements * end / whole;
      block = {block.data + from * element_bytes, (to - from) * element_bytes};
    }
  }
  return cut;
}

}  // namespace

Sharded::Sharded(const Call& call, std::size_t paths, const Make& make) {
  // By a size that is the same on all ranks, as the choice of the algorithm.
  const std::size_t parts = std::clamp<std::size_t>(call.choice_bytes() / kLeastPartBytes, 1, paths);
  for (std::size_t i = 0; i < parts; ++i) add(call, (call.sequence + i) % paths, i, i + 1, parts, make);
}

Sharded::Sharded(const Call& call, std::span<const std::uint32_t> weights, const Make& make) {
  const std::uint64_t whole = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  std::uint64_t first = 0;
  for (std::size_t path = 0; path < weights.size(); ++path) {
    if (weights[path] > 0) add(call, path, first, first + weights[path], whole, make);
    first += weights[path];
  }
}

void Sharded::add(const Call& call, std::size_t path, std::uint64_t first, std::uint64_t end, std::uint64_t whole,
                  const Make& make) {
  Part part{.path = path, .call = std::make_unique<Call>(part_of(call, first, end, whole)), .algorithm = nullptr};
  part.algorithm = make(*part.call, path);
  parts_.push_back(std::move(part));
}

void Sharded::mark() {
  for (Part& part : parts_) {
    if (!part.done) part.settled_at_mark = part.algorithm->settled_bytes();
  }
}

void Sharded::hold(std::size_t path, bool held) {
  for (Part& part : parts_) {
    if (part.path == path) part.held = held;
  }
}

Progress Sharded::poll(std::int64_t now_ns) {
  if (began_ns_ < 0) began_ns_ = now_ns;
  bool moved = false;
  Counts counts;
  int slowest_rank = counts_.slowest_rank;
  for (Part& part : parts_) {
    if (!part.done && !part.held) {
      const Progress progress = part.algorithm->poll(now_ns);
      if (progress == Progress::failed) return fail(part.algorithm->failure());
      moved |= progress != Progress::idle;
      part.done = progress == Progress::done;
      if (part.done) part.done_ns = now_ns;
      const int rank = part.algorithm->counts().slowest_rank;
      if (part.done || rank >= 0) slowest_rank = rank;
    }
    counts += part.algorithm->counts();
  }
  counts_ = counts;
  counts_.slowest_rank = slowest_rank;
  if (std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.done; })) return Progress::done;
  return moved ? Progress::moved : Progress::idle;
}

void Sharded::wait_for(WaitSet& set) const {
  for (const Part& part : parts_) {
    if (!part.done && !part.held) part.algorithm->wait_for(set);
  }
}

std::vector<int> Sharded::awaited() const {
  std::vector<int> ranks;
  for (const Part& part : parts_) {
    if (part.done) continue;
    const auto awaited = part.algorithm->awaited();
    ranks.insert(ranks.end(), awaited.begin(), awaited.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

bool Sharded::awaited_may_wait() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return !part.done && part.algorithm->awaited_may_wait(); });
}

}  // namespace netfold::collective
