#include <netfold/collective/sharded.hpp>
#include <netfold/kernels/types.hpp>

#include <algorithm>

namespace netfold::collective {
namespace {

Call part_of(const Call& call, std::size_t part, std::size_t parts) {
  Call cut = call;
  const std::size_t element_bytes = kernels::element_bytes(call.dtype);
  for (auto* blocks : {&cut.inputs, &cut.outputs}) {
    for (Buffer& block : *blocks) {
      const std::size_t elements = block.bytes / element_bytes;
      const std::size_t first = elements * part / parts;
      const std::size_t end = elements * (part + 1) / parts;
      block = {block.data + first * element_bytes, (end - first) * element_bytes};
    }
  }
  return cut;
}

}  // namespace

Sharded::Sharded(const Call& call, std::size_t shards, const Make& make) {
  // Like the algorithm, of what all ranks know alike.
  const std::size_t parts = std::clamp<std::size_t>(call.choice_bytes() / kLeastPartBytes, 1, shards);
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t shard = (call.sequence + i) % shards;
    auto cut = std::make_unique<Call>(part_of(call, i, parts));
    auto algorithm = make(*cut, shard);
    parts_.push_back({std::move(cut), std::move(algorithm)});
  }
}

Progress Sharded::poll(std::int64_t now_ns) {
  bool moved = false;
  std::uint64_t wire_bytes = 0;
  std::uint32_t retransmissions = 0;
  for (Part& part : parts_) {
    if (!part.done) {
      const Progress progress = part.algorithm->poll(now_ns);
      if (progress == Progress::failed) return fail(part.algorithm->failure());
      moved |= progress != Progress::idle;
      part.done = progress == Progress::done;
      if (part.done || part.algorithm->slowest_rank() >= 0) slowest_rank_ = part.algorithm->slowest_rank();
    }
    wire_bytes += part.algorithm->wire_bytes();
    retransmissions += part.algorithm->retransmissions();
  }
  wire_bytes_ = wire_bytes;
  retransmissions_ = retransmissions;
  if (std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.done; })) return Progress::done;
  return moved ? Progress::moved : Progress::idle;
}

void Sharded::wait_for(WaitSet& set) const {
  for (const Part& part : parts_) {
    if (!part.done) part.algorithm->wait_for(set);
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
