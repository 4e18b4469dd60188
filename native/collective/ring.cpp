#include <netfold/collective/ring.hpp>

namespace netfold::collective {

Ring::Ring(const Call& call, transport::Mesh& mesh, Team team) : PipelinedPlan(call, mesh, std::move(team)) {
  if (call.kind == Kind::all_reduce) plan_all_reduce();
  if (call.kind == Kind::reduce_scatter) plan_reduce_scatter();
  if (call.kind == Kind::all_gather) plan_all_gather();
  finish_plan();
}

void Ring::plan_all_reduce() {
  const int ranks = team().size();
  const int me = team().position();
  const int next = to(me + 1);
  const int previous = from(me - 1);
  const std::size_t unit = element_bytes();
  const Buffer& tensor = call().outputs[0];
  const Span whole{0, tensor.bytes / unit};
  const auto blocks = static_cast<std::size_t>(ranks);
  const std::size_t chunks = chunks_of(part(whole, blocks, 0).count * unit);
  const auto chunk_of = [&](int block, std::size_t index) {
    return part(part(whole, blocks, static_cast<std::size_t>(team().wrapped(block))), chunks, index);
  };
  std::vector<Mark> received(chunks);  // in the previous step
  for (int step = 0; step < 2 * (ranks - 1); ++step) {
    const bool reduces = step < ranks - 1;
    for (std::size_t i = 0; i < chunks; ++i) {
      const Span outbound = chunk_of(me - step, i);
      add(next, Send{tensor.data + outbound.first * unit, outbound.count * unit, received[i], step == ranks - 1});
    }
    for (std::size_t i = 0; i < chunks; ++i) {
      const Span inbound = chunk_of(me - step - 1, i);
      std::byte* data = tensor.data + inbound.first * unit;
      received[i] = add(previous, Receive{data, inbound.count * unit, reduces ? data : nullptr, true, {}});
    }
  }
}

void Ring::plan_reduce_scatter() {
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
    chunk_bytes = std::max(chunk_bytes, part({0, input.bytes / unit}, chunks, 0).count * unit);
  }
  // A slot is free again when its partial sum is sent. That send waits for the next rank, which waits for a slot of its
  // own, and so on round the ring. With more slots than a block has chunks, every wait is for an earlier chunk.
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
      const Span range = part({0, outbound.bytes / unit}, outbound_chunks, i);
      if (step == 0) {
        add(next, Send{outbound.data + range.first * unit, range.count * unit});
      } else {
        sent[partials[i].slot] = add(next, Send{partials[i].data, range.count * unit, partials[i].received});
      }
    }
    const Buffer& inbound = call().inputs[static_cast<std::size_t>(team().wrapped(me - 2 - step))];
    const bool last = step == ranks - 2;
    const std::size_t inbound_chunks = chunks_of(inbound.bytes);
    partials.clear();
    for (std::size_t i = 0; i < inbound_chunks; ++i) {
      const Span range = part({0, inbound.bytes / unit}, inbound_chunks, i);
      std::byte* own = inbound.data + range.first * unit;
      std::byte* into = last ? call().outputs[0].data + range.first * unit : slots_.get() + slot * chunk_bytes;
      const Mark free = last ? Mark{} : sent[slot];
      partials.push_back({into, add(previous, Receive{into, range.count * unit, own, true, free}), slot});
      slot = (slot + 1) % slots;
    }
  }
}

void Ring::plan_all_gather() {
  const int me = team().position();
  const int next = to(me + 1);
  const int previous = from(me - 1);
  const Buffer& own = call().outputs[static_cast<std::size_t>(me)];
  std::vector<Mark> received(chunks_of(own.bytes));
  for (int step = 0; step < team().size() - 1; ++step) {
    const auto sent = static_cast<std::size_t>(team().wrapped(me - step));
    const Buffer& outbound = step == 0 ? call().inputs[0] : call().outputs[sent];
    for (std::size_t i = 0; i < received.size(); ++i) {
      const Span range = part({0, outbound.bytes}, received.size(), i);
      add(next, Send{outbound.data + range.first, range.count, received[i]});
    }
    const Buffer& inbound = call().outputs[static_cast<std::size_t>(team().wrapped(me - step - 1))];
    received.assign(chunks_of(inbound.bytes), {});
    for (std::size_t i = 0; i < received.size(); ++i) {
      const Span range = part({0, inbound.bytes}, received.size(), i);
      received[i] = add(previous, Receive{inbound.data + range.first, range.count, nullptr, false, {}});
    }
  }
}

void Ring::after_first_sends() {
  if (call().kind != Kind::all_gather) return;
  copy_block(call().outputs[static_cast<std::size_t>(team().position())], call().inputs[0]);
}

}  // namespace netfold::collective
