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
  std::vector<Mark> here(static_cast<std::size_t>(ranks));  // of the block so many ranks further
  for (int far = 1; far < ranks; far *= 2) {
    const int partner_down = to(team().wrapped(me - far));
    const int partner_up = from(team().wrapped(me + far));
    for (int i = 0; i < std::min(far, ranks - far); ++i) {
      const Buffer& goes = i == 0 ? call().inputs[0] : block(me + i);
      add(partner_down, Send{goes.data, goes.bytes, here[static_cast<std::size_t>(i)]});
    }
    for (int i = 0; i < std::min(far, ranks - far); ++i) {
      const Buffer& comes = block(me + far + i);
      here[static_cast<std::size_t>(far + i)] = add(partner_up, Receive{comes.data, comes.bytes, nullptr, false, {}});
    }
  }
}

void Bruck::plan_all_to_all() {
  const int ranks = team().size();
  const int me = team().position();
  const std::size_t bytes = call().inputs[0].bytes;
  // A block on its way has two places, taken in turn: what arrives does not overwrite what is still leaving.
  const auto distances = static_cast<std::size_t>(ranks);
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(2 * distances * bytes);
  struct Travelling {
    std::byte* data;
    std::size_t place;
    Mark here;
    Mark left[2];
  };
  std::vector<Travelling> blocks(distances);  // by the distance they have to go
  for (std::size_t d = 1; d < distances; ++d) {
    const Buffer& input = call().inputs[static_cast<std::size_t>(team().wrapped(me + static_cast<int>(d)))];
    blocks[d] = {input.data, 1, {}, {}};
  }
  for (int far = 1; far < ranks; far *= 2) {
    const int partner_up = to(team().wrapped(me + far));
    const int partner_down = from(team().wrapped(me - far));
    for (std::size_t d = 1; d < distances; ++d) {
      if ((d & static_cast<std::size_t>(far)) == 0) continue;
      Travelling& block = blocks[d];
      block.left[block.place] = add(partner_up, Send{block.data, bytes, block.here});
      block.place ^= 1;
      block.data = scratch_.get() + (2 * d + block.place) * bytes;
      block.here = add(partner_down, Receive{block.data, bytes, nullptr, false, block.left[block.place]});
    }
  }
  for (const Travelling& block : blocks) arrived_.push_back(block.data);
}

void Bruck::plan_barrier() {
  const int me = team().position();
  Mark heard;
  for (int far = 1; far < team().size(); far *= 2) {
    add(to(team().wrapped(me + far)), Send{&word_, sizeof word_, heard});
    heard = add(from(team().wrapped(me - far)), Receive{&word_, sizeof word_, nullptr, false, heard});
  }
}

void Bruck::after_first_sends() {
  if (call().kind == Kind::barrier) return;
  const auto self = static_cast<std::size_t>(team().position());
  copy_block(call().outputs[self], call().inputs[call().kind == Kind::all_gather ? 0 : self]);
}

void Bruck::finish() {
  for (std::size_t d = 1; d < arrived_.size(); ++d) {
    const int from = team().wrapped(team().position() - static_cast<int>(d));
    const Buffer& to = call().outputs[static_cast<std::size_t>(from)];
    copy_block(to, {arrived_[d], to.bytes});
  }
}

}  // namespace netfold::collective
