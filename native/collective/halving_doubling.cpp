#include <netfold/collective/halving_doubling.hpp>

namespace netfold::collective {

HalvingDoubling::HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team_of)
    : PipelinedPlan(call, mesh, std::move(team_of)) {
  while (core_ * 2 <= team().size()) core_ *= 2;
  extra_ = team().size() - core_;
  number_ = is_paired() ? team().position() / 2 : team().position() - extra_;
  if (call.kind == Kind::all_reduce) plan_all_reduce();
  if (call.kind == Kind::reduce_scatter) plan_reduce_scatter();
  if (call.kind == Kind::all_gather) plan_all_gather();
  finish_plan();
}

void HalvingDoubling::plan_all_reduce() {
  const int me = team().position();
  const Buffer& whole = call().outputs[0];
  if (hands_over()) {
    send_block(me + 1, block(whole));
    receive_all(me + 1, whole, {}, false);
    return;
  }
  Mark stage;
  if (is_paired()) stage = receive_all(me - 1, whole, {}, true);
  std::vector<Buffer> held{whole};
  for (int bit = 1; bit < core_; bit *= 2) {
    const int partner = position_of(number_ ^ bit);
    const Buffer low = half(held.back(), 0);
    const Buffer high = half(held.back(), 1);
    const bool keeps_low = (number_ & bit) == 0;
    send_block(partner, block(keeps_low ? high : low, stage));
    held.push_back(keeps_low ? low : high);
    stage = receive_all(partner, held.back(), stage, true);
  }
  bool finished = true;  // the owner sends its final values first
  for (int bit = core_ / 2; bit >= 1; bit /= 2) {
    const int partner = position_of(number_ ^ bit);
    const Buffer own = held.back();
    held.pop_back();
    const bool kept_low = (number_ & bit) == 0;
    send_block(partner, block(own, stage), finished);
    stage = receive_all(partner, half(held.back(), kept_low ? 1 : 0), stage, false);
    finished = false;
  }
  if (is_paired()) send_block(me - 1, block(whole, stage));
}

void HalvingDoubling::plan_reduce_scatter() {
  const int me = team().position();
  std::vector<Block> blocks;
  for (const Buffer& input : call().inputs) blocks.push_back(block(input));
  Block& own = blocks[static_cast<std::size_t>(me)];
  std::byte* const result = call().outputs[0].data;
  if (hands_over()) {
    for (const Block& block : blocks) send_block(me + 1, block);
    own.received.assign(own.received.size(), {});
    receive_block(me + 1, own, result, false);
    return;
  }
  // Each block has its own place for sums in scratch; the last sum of this rank's block goes to the output.
  int first = 0;
  int last = core_;
  const auto halve = [&](int bit) { (number_ & bit) == 0 ? last = first + bit : first = last - bit; };
  if (!is_paired()) halve(core_ / 2);
  const Span summed = ranks_of(first, last);
  std::vector<std::byte*> sums(blocks.size());
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < summed.count; ++i) bytes += blocks[summed.first + i].bytes;
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::byte* next = scratch_.get();
  for (std::size_t i = summed.first; i < summed.first + summed.count; ++i) {
    sums[i] = next;
    next += blocks[i].bytes;
  }
  if (is_paired()) {
    for (std::size_t i = 0; i < blocks.size(); ++i) receive_block(me - 1, blocks[i], sums[i], true);
  }
  first = 0;
  last = core_;
  for (int bit = core_ / 2; bit >= 1; bit /= 2) {
    const int partner = position_of(number_ ^ bit);
    const Span before = ranks_of(first, last);
    halve(bit);
    const Span kept = ranks_of(first, last);
    for (std::size_t i = before.first; i < before.first + before.count; ++i) {
      if (i < kept.first || i >= kept.first + kept.count) send_block(partner, blocks[i]);
    }
    for (std::size_t i = kept.first; i < kept.first + kept.count; ++i) {
      receive_block(partner, blocks[i], bit == 1 && i == static_cast<std::size_t>(me) ? result : sums[i], true);
    }
  }
  if (is_paired()) send_block(me - 1, blocks[static_cast<std::size_t>(me - 1)]);
}

void HalvingDoubling::plan_all_gather() {
  const int me = team().position();
  std::vector<Block> blocks;
  for (const Buffer& output : call().outputs) blocks.push_back(block(output));
  blocks[static_cast<std::size_t>(me)].data = call().inputs[0].data;
  const auto receive = [&](int position, std::size_t rank) {
    receive_block(position, blocks[rank], blocks[rank].data, false);
  };
  if (is_paired()) {
    const int other = hands_over() ? me + 1 : me - 1;
    if (hands_over()) {
      send_block(other, blocks[static_cast<std::size_t>(me)]);
    } else {
      receive(other, static_cast<std::size_t>(other));
    }
  }
  for (int bit = 1; bit < core_ && !hands_over(); bit *= 2) {
    const int first = number_ & ~(bit - 1);
    const int partner = position_of(number_ ^ bit);
    const Span mine = ranks_of(first, first + bit);
    const Span theirs = ranks_of(first ^ bit, (first ^ bit) + bit);
    for (std::size_t i = mine.first; i < mine.first + mine.count; ++i) send_block(partner, blocks[i]);
    for (std::size_t i = theirs.first; i < theirs.first + theirs.count; ++i) receive(partner, i);
  }
  if (!is_paired()) return;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (hands_over() && i != static_cast<std::size_t>(me)) receive(me + 1, i);
    if (!hands_over() && i != static_cast<std::size_t>(me - 1)) send_block(me - 1, blocks[i]);
  }
}

Span HalvingDoubling::ranks_of(int first, int last) const {
  const auto begin = [&](int number) { return static_cast<std::size_t>(number + std::min(number, extra_)); };
  return {begin(first), begin(last) - begin(first)};
}

HalvingDoubling::Block HalvingDoubling::block(const Buffer& buffer, Mark after) const {
  return {buffer.data, buffer.bytes, std::vector<Mark>(chunks_of(buffer.bytes), after)};
}

void HalvingDoubling::send_block(int position, const Block& block, bool finished) {
  for (std::size_t i = 0; i < block.received.size(); ++i) {
    const Buffer chunk = part({block.data, block.bytes}, block.received.size(), i, element_bytes());
    add(to(position), Send{chunk.data, chunk.bytes, block.received[i], finished});
  }
}

void HalvingDoubling::receive_block(int position, Block& block, std::byte* into, bool reduces) {
  for (std::size_t i = 0; i < block.received.size(); ++i) {
    const Buffer own = part({block.data, block.bytes}, block.received.size(), i, element_bytes());
    std::byte* to_chunk = into + (own.data - block.data);
    block.received[i] =
        add(from(position), Receive{to_chunk, own.bytes, reduces ? own.data : nullptr, false, block.received[i]});
  }
  block.data = into;
}

PipelinedPlan::Mark HalvingDoubling::receive_all(int position, const Buffer& range, Mark after, bool reduces) {
  Block all = block(range, after);
  receive_block(position, all, range.data, reduces);
  return all.received.back();
}

}  // namespace netfold::collective
