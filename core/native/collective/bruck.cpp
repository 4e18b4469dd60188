// Bruck's exchanges (Bruck et al., 1997): in ceil(log2 P) steps, to a partner twice as far away each time.
//
//   all_gather  step k: a rank sends its min(2^k, P-2^k) blocks to the rank 2^k positions before it. n(P-1)/P bytes in
//               all, the minimum; blocks may differ in size.
//   all_to_all  step k: a rank passes every block with bit k in its remaining distance to the rank 2^k positions ahead.
//               About (n/2) log2 P bytes, more than any other algorithm, in fewer messages. Equal blocks only: a rank
//               that passes blocks on knows only the sizes of its own.
//   barrier     step k: a rank sends to the rank 2^k positions ahead; after it, that rank knows that the 2^(k+1)-1
//               ranks before it have arrived (the dissemination barrier of Hensgen, Finkel & Manber, 1988). A byte a
//               step.
//
// Every partner gets one header, every block one marker.
#include <netfold/collective/pipelined_plan.hpp>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class Bruck final : public PipelinedPlan {
 public:
  // P >= 2. all_to_all allocates twice its input.
  Bruck(const Call& call, transport::Mesh& mesh, Team team) : PipelinedPlan(call, mesh, std::move(team)) {
    if (call.kind == Kind::all_gather) plan_all_gather();
    if (call.kind == Kind::all_to_all) plan_all_to_all();
    if (call.kind == Kind::barrier) plan_barrier();
    finish_plan();
  }

 private:
  void plan_all_gather() {
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

  void plan_all_to_all() {
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

  void plan_barrier() {
    const int me = team().position();
    Mark received;
    for (int distance = 1; distance < team().size(); distance *= 2) {
      add(to(me + distance), Send{&token_, sizeof token_, received});
      received = add(from(me - distance), Receive{&token_, sizeof token_, nullptr, false, received});
    }
  }

  void add_last_copies(BlockCopies& copies) override {
    for (std::size_t d = 1; d < arrived_.size(); ++d) {
      const int from = team().wrapped(team().position() - static_cast<int>(d));
      const Buffer& to = call().outputs[static_cast<std::size_t>(from)];
      copies.add(to, {arrived_[d], to.bytes});
    }
  }

  std::unique_ptr<std::byte[]> scratch_;
  std::byte token_{};                // a barrier's message
  std::vector<std::byte*> arrived_;  // all_to_all: this rank's blocks, by the distance they came
};

}  // namespace

std::unique_ptr<Algorithm> make_bruck(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<Bruck>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
