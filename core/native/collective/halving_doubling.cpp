// Recursive halving-doubling all-reduce: vector halving with distance doubling, and back (Rabenseifner, 2004; Thakur et
// al., 2005, section 4.5).
//
// Of P ranks, Q = 2^floor(log2 P) form the core. In step k a core rank exchanges half of the elements that it still
// holds with the core rank whose number differs in bit k, and reduces. After log2 Q steps it owns n/Q final values, and
// the same exchanges backwards spread them. 2 log2 Q steps, 2n(Q-1)/Q bytes sent a rank. Each of the other P-Q ranks
// first hands its n bytes to a neighbour in the core, and gets n bytes back last: two steps more, and n more bytes for
// it and its neighbour.
//
// The two halves of it, with the distant partner first and last, so that every rank ends with, or starts from, its own
// block:
//
//   reduce_scatter  recursive halving: in each step a rank sends its sums for the other half of the remaining ranks.
//                   log2 Q steps, n(Q-1)/Q bytes.
//   all_gather      recursive doubling: in each step two partners swap all blocks that they have. log2 Q steps,
//                   n(Q-1)/Q bytes.
//
// Ranks outside the core hand over their inputs first and get their outputs last: two steps more, and the whole n once
// (reduce_scatter: on the way in; all_gather: on the way back). Blocks may differ in size.
//
// Order of summation: own + partner's, partner by partner; the contribution of a rank outside the core comes first.
// all_reduce goes in ascending distance, reduce_scatter in descending distance. A narrower wire format is rounded at
// every exchange and once by a block's owner.
#include <netfold/collective/pipelined_plan.hpp>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class HalvingDoubling final : public PipelinedPlan {
 public:
  // P >= 2. reduce_scatter allocates half of its input; a rank with a neighbour
  // outside the core allocates as much as its whole input.
  HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team_of)
      : PipelinedPlan(call, mesh, std::move(team_of)) {
    while (core_ * 2 <= team().size()) core_ *= 2;
    extra_ = team().size() - core_;
    number_ = is_paired() ? team().position() / 2 : team().position() - extra_;
    if (call.kind == Kind::all_reduce) plan_all_reduce();
    if (call.kind == Kind::reduce_scatter) plan_reduce_scatter();
    if (call.kind == Kind::all_gather) plan_all_gather();
    finish_plan();
  }

 private:
  // A rank's block: its current place, and for each chunk the mark that is reached when the chunk is there.
  struct Block {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::vector<Mark> received;
  };

  void plan_all_reduce() {
    const int me = team().position();
    const Buffer& whole = call().outputs[0];
    if (hands_over()) {
      send_block(me + 1, block(whole));
      receive_all(me + 1, whole, {});
      return;
    }
    Mark stage;
    if (is_paired()) stage = receive_all(me - 1, whole, {}, pair_sum());
    std::vector<Buffer> held{whole};
    for (int bit = 1; bit < core_; bit *= 2) {
      const int partner = position_of(number_ ^ bit);
      const Buffer low = half(held.back(), 0);
      const Buffer high = half(held.back(), 1);
      const bool keeps_low = (number_ & bit) == 0;
      send_block(partner, block(keeps_low ? high : low, stage));
      held.push_back(keeps_low ? low : high);
      stage = receive_all(partner, held.back(), stage, core_sum(partner, bit == 1, bit == core_ / 2));
    }
    bool finished = true;  // the owner sends its final values first
    for (int bit = core_ / 2; bit >= 1; bit /= 2) {
      const int partner = position_of(number_ ^ bit);
      const Buffer own = held.back();
      held.pop_back();
      const bool kept_low = (number_ & bit) == 0;
      send_block(partner, block(own, stage), finished);
      stage = receive_all(partner, half(held.back(), kept_low ? 1 : 0), stage);
      finished = false;
    }
    if (is_paired()) send_block(me - 1, block(whole, stage));
  }

  void plan_reduce_scatter() {
    const int me = team().position();
    std::vector<Block> blocks;
    for (const Buffer& input : call().inputs) blocks.push_back(block(input));
    Block& own = blocks[static_cast<std::size_t>(me)];
    std::byte* const result = call().outputs[0].data;
    if (hands_over()) {
      for (const Block& block : blocks) send_block(me + 1, block);
      own.received.assign(own.received.size(), {});
      receive_block(me + 1, own, result);
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
      for (std::size_t i = 0; i < blocks.size(); ++i) receive_block(me - 1, blocks[i], sums[i], pair_sum());
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
        receive_block(partner, blocks[i], bit == 1 && i == static_cast<std::size_t>(me) ? result : sums[i],
                      core_sum(partner, bit == core_ / 2, bit == 1));
      }
    }
    if (is_paired()) send_block(me - 1, blocks[static_cast<std::size_t>(me - 1)]);
  }

  void plan_all_gather() {
    const int me = team().position();
    std::vector<Block> blocks;
    for (const Buffer& output : call().outputs) blocks.push_back(block(output));
    blocks[static_cast<std::size_t>(me)].data = call().inputs[0].data;
    const auto receive = [&](int position, std::size_t rank) {
      receive_block(position, blocks[rank], blocks[rank].data);
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

  // The consecutive ranks of the core numbers [first, last), with their neighbours outside the core.
  Span ranks_of(int first, int last) const {
    const auto begin = [&](int number) { return static_cast<std::size_t>(number + std::min(number, extra_)); };
    return {begin(first), begin(last) - begin(first)};
  }

  bool is_paired() const { return team().position() < 2 * extra_; }
  bool hands_over() const { return is_paired() && team().position() % 2 == 0; }
  int position_of(int number) const { return number < extra_ ? 2 * number + 1 : number + extra_; }
  Buffer half(const Buffer& buffer, std::size_t index) const { return part(buffer, 2, index, element_bytes()); }
  // A block in place, with all chunks there at `after`.
  Block block(const Buffer& buffer, Mark after = {}) const {
    return {buffer.data, buffer.bytes, std::vector<Mark>(chunks_of(buffer.bytes), after)};
  }

  void send_block(int position, const Block& block, bool finished = false) {
    for (std::size_t i = 0; i < block.received.size(); ++i) {
      const Buffer chunk = part({block.data, block.bytes}, block.received.size(), i, element_bytes());
      add(to(position), Send{chunk.data, chunk.bytes, block.received[i], finished});
    }
  }

  // A received block is added to own values, or to a sum of several ranks.
  struct Sum {
    int arrived_of;
    int own_of;
    bool finishes;
  };
  Sum pair_sum() const { return {team().position() - 1, team().position(), false}; }
  // Returns the sum that a step with `partner` in the core makes. A pair's rank in the core has a sum from the start.
  Sum core_sum(int partner, bool is_first, bool is_last) const {
    const auto of = [&](int position) { return is_first && position >= 2 * extra_ ? position : Reduction::kSum; };
    return {of(partner), of(team().position()), is_last};
  }

  // Moves the block to `into`; with a sum: into = block + arrived.
  void receive_block(int position, Block& block, std::byte* into, std::optional<Sum> sum = {}) {
    for (std::size_t i = 0; i < block.received.size(); ++i) {
      const Buffer own = part({block.data, block.bytes}, block.received.size(), i, element_bytes());
      Receive chunk{.into = into + (own.data - block.data), .bytes = own.bytes, .after = block.received[i]};
      if (sum) {
        chunk.operand = own.data;
        chunk.arrived_of = sum->arrived_of;
        chunk.operand_of = sum->own_of;
        chunk.finishes = sum->finishes;
      }
      block.received[i] = add(from(position), chunk);
    }
    block.data = into;
  }

  // Receives all chunks of `range` in place, each after `after`. Returns the mark of the last chunk.
  Mark receive_all(int position, const Buffer& range, Mark after, std::optional<Sum> sum = {}) {
    Block all = block(range, after);
    receive_block(position, all, range.data, sum);
    return all.received.back();
  }

  int core_ = 1;    // Q
  int extra_ = 0;   // P-Q: the first 2(P-Q) ranks form pairs; the even one hands over to the odd one
  int number_ = 0;  // the core number of this rank, or of the rank that it hands over to
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace

std::unique_ptr<Algorithm> make_halving_doubling(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<HalvingDoubling>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
