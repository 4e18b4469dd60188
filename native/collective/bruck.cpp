#include <netfold/collective/bruck.hpp>

namespace netfold::collective {

Bruck::Bruck(const Call& call, transport::Mesh& mesh, Team team) : PipelinedPlan(call, mesh, std::move(team)) {
  if (call.kind == Kind::all_gather) plan_all_gather();
  if (call.kind == Kind::all_to_all) plan_all_to_all();
  if (call.kind == Kind::barrier) plan_barrier();
  finish_plan();
}

void Bruck::plan_all_gather() {
  const int ranks = team().size();
  const int me = team().position();
  const auto block = [&](int position) -> const Buffer& {
    return call().outputs[static_cast<std::size_t>(team().wrapped(position))];
  };
  std::vector<Mark> received(static_cast<std::size_t>(ranks));  // by the distance ahead of the block's rank
  for (int distance = 1; distance < ranks; distance *= 2) {
    const int target = to(me - distance);
    const int source = from(me + distance);
    const int count = std::min(distance, ranks - distance);
    for (int i = 0; i < count; ++i) {
      const Buffer& outbound = i == 0 ? call().inputs[0] : block(me + i);
      add(target, Send{outbound.data, outbound.bytes, received[static_cast<std::size_t>(i)]});
    }
    for (int i = 0; i < count; ++i) {
      const Buffer& inbound = block(me + distance + i);
      received[static_cast<std::size_t>(distance + i)] =
          add(source, Receive{inbound.data, inbound.bytes, nullptr, false, {}});
    }
  }
}

void Bruck::plan_all_to_all() {
  const int ranks = team().size();
  const int me = team().position();
  const std::size_t bytes = call().inputs[0].bytes;
  // A travelling block has two slots, used in turn: an arriving block does not overwrite one that is still leaving.
  const auto distances = static_cast<std::size_t>(ranks);
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(2 * distances * bytes);
  struct Travelling {
    std::byte* data;
    std::size_t slot;
    Mark received;
    Mark sent[2];
  };
  std::vector<Travelling> blocks(distances);  // by the distance that they travel
  for (std::size_t d = 1; d < distances; ++d) {
    const Buffer& input = call().inputs[static_cast<std::size_t>(team().wrapped(me + static_cast<int>(d)))];
    blocks[d] = {input.data, 1, {}, {}};
  }
  for (int distance = 1; distance < ranks; distance *= 2) {
    const int target = to(me + distance);
    const int source = from(me - distance);
    for (std::size_t d = 1; d < distances; ++d) {
      if ((d & static_cast<std::size_t>(distance)) == 0) continue;
      Travelling& block = blocks[d];
      block.sent[block.slot] = add(target, Send{block.data, bytes, block.received});
      block.slot ^= 1;
      block.data = scratch_.get() + (2 * d + block.slot) * bytes;
      block.received = add(source, Receive{block.data, bytes, nullptr, false, block.sent[block.slot]});
    }
  }
  for (const Travelling& block : blocks) arrived_.push_back(block.data);
}

void Bruck::plan_barrier() {
  const int me = team().position();
  Mark received;
  for (int distance = 1; distance < team().size(); distance *= 2) {
    add(to(me + distance), Send{&token_, sizeof token_, received});
    received = add(from(me - distance), Receive{&token_, sizeof token_, nullptr, false, received});
  }
}

void Bruck::finish() {
  for (std::size_t d = 1; d < arrived_.size(); ++d) {
    const int from = team().wrapped(team().position() - static_cast<int>(d));
    const Buffer& to = call().outputs[static_cast<std::size_t>(from)];
    copy_block(to, {arrived_[d], to.bytes});
  }
}

}  // namespace netfold::collective
