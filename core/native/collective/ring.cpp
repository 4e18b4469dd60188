// Ring: every rank sends to the next and receives from the previous one (Patarasuk & Yuan, 2009).
//
//   reduce_scatter  P-1 steps; a rank sends n(P-1)/P of its n bytes of input (uneven: all blocks but its own)
//   all_gather      P-1 steps; n(P-1)/P of the n bytes of output (uneven: all blocks but the next rank's)
//   all_reduce      both in sequence, in place: 2(P-1) steps, 2n(P-1)/P bytes, the minimum of any host algorithm
//
// and one header a stream, one marker a chunk. A block travels in chunks (chunks_of). A chunk that arrives in one step
// is sent on in the next step as soon as it is reduced, so a step costs the latency of one chunk and not of one block.
//
// Order of summation: all_reduce adds block b from rank b upwards, round the ring; reduce_scatter adds rank b's block
// from rank b+1 upwards, round the ring. In a wire format narrower than the tensor, partial sums are rounded at every
// hop. The owner of a finished block rounds the block too, so that every rank ends with the same bits.
#include <netfold/collective/pipelined_plan.hpp>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class Ring final : public PipelinedPlan {
 public:
  // P >= 2. reduce_scatter allocates a block of scratch and a little more.
  Ring(const Call& call, transport::Mesh& mesh, Team team) : PipelinedPlan(call, mesh, std::move(team)) {
    if (call.kind == Kind::all_reduce) plan_all_reduce();
    if (call.kind == Kind::reduce_scatter) plan_reduce_scatter();
    if (call.kind == Kind::all_gather) plan_all_gather();
    finish_plan();
  }

 private:
  void plan_all_reduce() {
    const int ranks = team().size();
    const int me = team().position();
    const int next = to(me + 1);
    const int previous = from(me - 1);
    const std::size_t unit = element_bytes();
    const Buffer& tensor = call().outputs[0];
    const auto blocks = static_cast<std::size_t>(ranks);
    const std::size_t chunks = chunks_of(part(tensor, blocks, 0, unit).bytes);
    const auto chunk_of = [&](int block, std::size_t index) {
      return part(part(tensor, blocks, static_cast<std::size_t>(team().wrapped(block)), unit), chunks, index, unit);
    };
    std::vector<Mark> received(chunks);  // in the previous step
    for (int step = 0; step < 2 * (ranks - 1); ++step) {
      const bool reduces = step < ranks - 1;
      for (std::size_t i = 0; i < chunks; ++i) {
        const Buffer outbound = chunk_of(me - step, i);
        add(next, Send{outbound.data, outbound.bytes, received[i], step == ranks - 1});
      }
      for (std::size_t i = 0; i < chunks; ++i) {
        const Buffer inbound = chunk_of(me - step - 1, i);
        Receive chunk{.into = inbound.data, .bytes = inbound.bytes};
        if (reduces) chunk = reducing(inbound, inbound.data, step);
        received[i] = add(previous, chunk);
      }
    }
  }

  // A chunk that arrives in a step is added to this rank's own. In the first step it is the previous rank's own.
  Receive reducing(const Buffer& own, std::byte* into, int step) const {
    const int me = team().position();
    return {.into = into,
            .bytes = own.bytes,
            .operand = own.data,
            .arrived_first = true,
            .arrived_of = step == 0 ? team().wrapped(me - 1) : Reduction::kSum,
            .operand_of = me,
            .finishes = step == team().size() - 2};
  }

  void plan_reduce_scatter() {
    const int ranks = team().size();
    const int me = team().position();
    const int next = to(me + 1);
    const int previous = from(me - 1);
    const std::size_t unit = element_bytes();
    std::size_t most_chunks = 0;
    std::size_t chunk_bytes = 0;
    for (const Buffer& input : call().inputs) {
      const std::size_t chunks = chunks_of(input.bytes);
      most_chunks = std::max(most_chunks, chunks);
      chunk_bytes = std::max(chunk_bytes, part(input, chunks, 0, unit).bytes);
    }
    // A slot is free again when its partial sum is sent. That send waits for the next rank, which waits for a slot of
    // its own, and so on round the ring. With more slots than a block has chunks, every wait is for an earlier chunk.
    const std::size_t slots = most_chunks + 2;
    if (ranks > 2) slots_ = std::make_unique_for_overwrite<std::byte[]>(slots * chunk_bytes);
    std::vector<Mark> sent(slots);
    std::size_t slot = 0;

    struct Partial {
      std::byte* data;
      Mark received;
      std::size_t slot;
    };
    std::vector<Partial> partials;
    for (int step = 0; step < ranks - 1; ++step) {
      const Buffer& outbound = call().inputs[static_cast<std::size_t>(team().wrapped(me - 1 - step))];
      const std::size_t outbound_chunks = chunks_of(outbound.bytes);
      for (std::size_t i = 0; i < outbound_chunks; ++i) {
        const Buffer chunk = part(outbound, outbound_chunks, i, unit);
        if (step == 0) {
          add(next, Send{chunk.data, chunk.bytes});
        } else {
          sent[partials[i].slot] = add(next, Send{partials[i].data, chunk.bytes, partials[i].received});
        }
      }
      const Buffer& inbound = call().inputs[static_cast<std::size_t>(team().wrapped(me - 2 - step))];
      const bool last = step == ranks - 2;
      const std::size_t inbound_chunks = chunks_of(inbound.bytes);
      partials.clear();
      for (std::size_t i = 0; i < inbound_chunks; ++i) {
        const Buffer own = part(inbound, inbound_chunks, i, unit);
        std::byte* into =
            last ? part(call().outputs[0], inbound_chunks, i, unit).data : slots_.get() + slot * chunk_bytes;
        const Mark free = last ? Mark{} : sent[slot];
        Receive chunk = reducing(own, into, step);
        chunk.after = free;
        partials.push_back({into, add(previous, chunk), slot});
        slot = (slot + 1) % slots;
      }
    }
  }

  void plan_all_gather() {
    const int me = team().position();
    const int next = to(me + 1);
    const int previous = from(me - 1);
    const Buffer& own = call().outputs[static_cast<std::size_t>(me)];
    std::vector<Mark> received(chunks_of(own.bytes));
    for (int step = 0; step < team().size() - 1; ++step) {
      const auto sent = static_cast<std::size_t>(team().wrapped(me - step));
      const Buffer& outbound = step == 0 ? call().inputs[0] : call().outputs[sent];
      for (std::size_t i = 0; i < received.size(); ++i) {
        const Buffer chunk = part(outbound, received.size(), i, 1);
        add(next, Send{chunk.data, chunk.bytes, received[i]});
      }
      const Buffer& inbound = call().outputs[static_cast<std::size_t>(team().wrapped(me - step - 1))];
      received.assign(chunks_of(inbound.bytes), {});
      for (std::size_t i = 0; i < received.size(); ++i) {
        const Buffer chunk = part(inbound, received.size(), i, 1);
        received[i] = add(previous, Receive{.into = chunk.data, .bytes = chunk.bytes});
      }
    }
  }

  std::unique_ptr<std::byte[]> slots_;  // partial sums to send
};

}  // namespace

std::unique_ptr<Algorithm> make_ring(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<Ring>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
