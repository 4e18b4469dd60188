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
  const int next = to(team().wrapped(me + 1));
  const int previous = from(team().wrapped(me - 1));
  const std::size_t unit = element_bytes();
  const Buffer& tensor = call().outputs[0];
  const Span whole{0, tensor.bytes / unit};
  const auto blocks = static_cast<std::size_t>(ranks);
  const std::size_t chunks = chunks_of(part(whole, blocks, 0).count * unit);
  const auto requested_chunk = [&](int block, std::size_t index) {
    return part(part(whole, blocks, static_cast<std::size_t>(team().wrapped(block))), chunks, index);
  };
  std::vector<Mark> arrived(chunks);  // of the step before
  for (int step = 0; step < 2 * (ranks - 1); ++step) {
    const bool reduces = step < ranks - 1;
    for (std::size_t i = 0; i < chunks; ++i) {
      const Span mine = requested_chunk(me - step, i);
      add(next, Send{tensor.data + mine.first * unit, mine.count * unit, arrived[i], step == ranks - 1});
    }
    for (std::size_t i = 0; i < chunks; ++i) {
      const Span theirs = requested_chunk(me - step - 1, i);
      std::byte* data = tensor.data + theirs.first * unit;
      arrived[i] = add(previous, Receive{data, theirs.count * unit, reduces ? data : nullptr, true, {}});
    }
  }
}

void Ring::plan_reduce_scatter() {
  const int ranks = team().size();
  const int me = team().position();
  const int next = to(team().wrapped(me + 1));
  const int previous = from(team().wrapped(me - 1));
  const std::size_t unit = element_bytes();
  std::size_t most_chunks = 0;
  std::size_t chunk_bytes = 0;
  for (const Buffer& input : call().inputs) {
    const std::size_t chunks = chunks_of(input.bytes);
    most_chunks = std::max(most_chunks, chunks);
    chunk_bytes = std::max(chunk_bytes, part({0, input.bytes / unit}, chunks, 0).count * unit);
  }
  // A slot is free again when its partial sum has left. That send waits for the next rank, who waits for a slot of its
  // own, and so on round the ring: with more slots than a block has chunks every wait is for an earlier chunk.
  const std::size_t slots = most_chunks + 2;
  if (ranks > 2) slots_ = std::make_unique_for_overwrite<std::byte[]>(slots * chunk_bytes);
  std::vector<Mark> left(slots);
  std::size_t slot = 0;

  struct Partial {
    std::byte* data;
    Mark arrived;
    std::size_t slot;
  };
  std::vector<Partial> partials;
  for (int step = 0; step < ranks - 1; ++step) {
    const Buffer& goes = call().inputs[static_cast<std::size_t>(team().wrapped(me - 1 - step))];
    const std::size_t going = chunks_of(goes.bytes);
    for (std::size_t i = 0; i < going; ++i) {
      const Span what = part({0, goes.bytes / unit}, going, i);
      if (step == 0) {
        add(next, Send{goes.data + what.first * unit, what.count * unit});
      } else {
        left[partials[i].slot] = add(next, Send{partials[i].data, what.count * unit, partials[i].arrived});
      }
    }
    const Buffer& comes = call().inputs[static_cast<std::size_t>(team().wrapped(me - 2 - step))];
    const bool last = step == ranks - 2;
    const std::size_t coming = chunks_of(comes.bytes);
    partials.clear();
    for (std::size_t i = 0; i < coming; ++i) {
      const Span what = part({0, comes.bytes / unit}, coming, i);
      std::byte* own = comes.data + what.first * unit;
      std::byte* into = last ? call().outputs[0].data + what.first * unit : slots_.get() + slot * chunk_bytes;
      const Mark free = last ? Mark{} : left[slot];
      partials.push_back({into, add(previous, Receive{into, what.count * unit, own, true, free}), slot});
      slot = (slot + 1) % slots;
    }
  }
}

void Ring::plan_all_gather() {
  const int ranks = team().size();
  const int me = team().position();
  const int next = to(team().wrapped(me + 1));
  const int previous = from(team().wrapped(me - 1));
  const Buffer& own = call().outputs[static_cast<std::size_t>(me)];
  std::vector<Mark> arrived(chunks_of(own.bytes));
  for (int step = 0; step < ranks - 1; ++step) {
    const auto sent = static_cast<std::size_t>(team().wrapped(me - step));
    const Buffer& goes = step == 0 ? call().inputs[0] : call().outputs[sent];
    for (std::size_t i = 0; i < arrived.size(); ++i) {
      const Span what = part({0, goes.bytes}, arrived.size(), i);
      add(next, Send{goes.data + what.first, what.count, arrived[i]});
    }
    const Buffer& comes = call().outputs[static_cast<std::size_t>(team().wrapped(me - step - 1))];
    arrived.assign(chunks_of(comes.bytes), {});
    for (std::size_t i = 0; i < arrived.size(); ++i) {
      const Span what = part({0, comes.bytes}, arrived.size(), i);
      arrived[i] = add(previous, Receive{comes.data + what.first, what.count, nullptr, false, {}});
    }
  }
}

void Ring::after_first_sends() {
  if (call().kind != Kind::all_gather) return;
  copy_block(call().outputs[static_cast<std::size_t>(team().position())], call().inputs[0]);
}

}  // namespace netfold::collective
