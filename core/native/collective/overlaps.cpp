// Calls whose outputs overlap their inputs: what works in place, and what works on a copy of the inputs.
//
// In place, without a copy: this rank's own block is the same memory as an input and as an output, which every
// algorithm leaves where it is. In every other overlap a result would replace values that are still to be sent: an
// all_to_all in place, or an output that lies across two inputs. Such a call works on a copy of its inputs, made when
// its turn comes, since earlier calls may still write them. Cost: the memory and one pass over the inputs.
#include <netfold/collective/slice.hpp>

#include <algorithm>
#include <optional>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

std::vector<Buffer> by_address(const std::vector<Buffer>& buffers) {
  std::vector<Buffer> sorted;
  std::ranges::copy_if(buffers, std::back_inserter(sorted), [](const Buffer& each) { return each.bytes > 0; });
  if (!std::ranges::is_sorted(sorted, {}, &Buffer::data)) std::ranges::sort(sorted, {}, &Buffer::data);
  return sorted;
}

const std::byte* end_of(const Buffer& buffer) { return buffer.data + buffer.bytes; }

// The memory from the first to the last byte of all buffers. Tells most calls without an overlap, and allocates nothing.
Buffer extent_of(const std::vector<Buffer>& buffers) {
  const std::byte* first = nullptr;
  const std::byte* last = nullptr;
  for (const Buffer& each : buffers) {
    if (each.bytes == 0) continue;
    first = first == nullptr ? each.data : std::min<const std::byte*>(first, each.data);
    last = std::max(last, end_of(each));
  }
  return {const_cast<std::byte*>(first), static_cast<std::size_t>(last - first)};
}

// Whether each buffer begins behind the one before, as the parts of one tensor do.
bool are_consecutive(const std::vector<Buffer>& buffers) {
  const std::byte* end = nullptr;
  return std::ranges::all_of(buffers, [&](const Buffer& each) {
    if (each.bytes == 0) return true;
    const bool is_behind = each.data >= end;
    end = end_of(each);
    return is_behind;
  });
}

// The buffer of the rank's own block in a list of one a rank, or the only buffer of the list.
const Buffer& own_of(const std::vector<Buffer>& buffers, int rank) {
  return buffers[buffers.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
}

class CopiedInputs final : public Algorithm {
 public:
  CopiedInputs(const Call& call, const Paths& paths) : call_(call), paths_(paths), copied_call_(call) {
    copied_call_.copies_inputs = false;
    std::size_t bytes = 0;
    for (const Buffer& input : call.inputs) bytes += input.bytes;
    copy_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::byte* next = copy_.get();
    for (Buffer& input : copied_call_.inputs) {
      const Buffer copy{next, input.bytes};
      copies_.add(copy, input);
      input = copy;
      next += copy.bytes;
    }
    // Calls over a switch begin in one order on all ranks, so this one must not begin later than the calls behind it.
    if (call.algorithm != AlgorithmId::in_network) return;
    while (copies_.advance()) {
    }
    begin();
  }

  Progress poll(std::int64_t now_ns) override {
    if (!begun_) {
      if (!copies_.advance()) begin();
      return Progress::moved;
    }
    if (algorithm_ == nullptr) return Progress::done;
    const Progress progress = algorithm_->poll(now_ns);
    counts_ = algorithm_->counts();
    substitute_ = algorithm_->substitute();
    return progress == Progress::failed ? fail(algorithm_->failure()) : progress;
  }
  void wait_for(WaitSet& set) const override {
    if (algorithm_ != nullptr) algorithm_->wait_for(set);
    set.look_again |= !begun_;
  }
  std::vector<int> awaited() const override {
    return algorithm_ != nullptr ? algorithm_->awaited() : std::vector<int>{};
  }
  bool awaited_may_wait() const override { return algorithm_ != nullptr && algorithm_->awaited_may_wait(); }

 private:
  void begin() {
    begun_ = true;
    algorithm_ = make_algorithm(copied_call_, paths_);
  }

  const Call& call_;
  const Paths paths_;
  Call copied_call_;
  std::unique_ptr<std::byte[]> copy_;
  BlockCopies copies_;
  bool begun_ = false;
  std::unique_ptr<Algorithm> algorithm_;
};

}  // namespace

bool outputs_overlap(const Call& call) {
  if (call.outputs.size() < 2 || are_consecutive(call.outputs)) return false;
  const std::vector<Buffer> sorted = by_address(call.outputs);
  const auto meets_next = [](const Buffer& each, const Buffer& next) { return next.data < end_of(each); };
  return std::ranges::adjacent_find(sorted, meets_next) != sorted.end();
}

bool needs_copied_inputs(const Call& call, int rank) {
  const Buffer all_inputs = extent_of(call.inputs);
  const Buffer all_outputs = extent_of(call.outputs);
  if (all_inputs.data >= end_of(all_outputs) || all_outputs.data >= end_of(all_inputs)) return false;
  const std::vector<Buffer> outputs = by_address(call.outputs);
  const Buffer& own_output = own_of(call.outputs, rank);
  const std::byte* const own_input = own_of(call.inputs, rank).data;
  return std::ranges::any_of(call.inputs, [&](const Buffer& input) {
    if (input.bytes == 0) return false;
    const auto first = std::ranges::upper_bound(outputs, input.data, {}, end_of);
    if (first == outputs.end() || first->data >= end_of(input)) return false;
    const bool is_own = input.data == own_input && input.data == own_output.data && input.bytes == own_output.bytes;
    return !is_own;
  });
}

std::unique_ptr<Algorithm> make_copied_inputs(const Call& call, const Paths& paths) {
  return std::make_unique<CopiedInputs>(call, paths);
}

}  // namespace netfold::collective
