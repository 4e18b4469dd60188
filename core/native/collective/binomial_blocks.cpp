// Gather and scatter along a binomial tree: a rank passes on its whole subtree's blocks as one message.
//
// ceil(log2 P) steps. n(P-1)/P bytes go through the root's link, in log2 P messages instead of P-1, and up to half of
// that through the links of the root's children. A rank inside the tree allocates its subtree's blocks, the root all n.
//
// Blocks may differ in size, and only the root and a block's owner know the block's size. So the message before the
// blocks carries the sizes, eight bytes a block. A rank that passes blocks on reads their positions from the sizes; the
// root of a gather, and every rank of a scatter, compares them with the sizes that it expects.
#include <netfold/collective/message.hpp>

#include <algorithm>
#include <numeric>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class BinomialBlocks final : public Algorithm {
 public:
  // Kinds gather, scatter; P >= 2.
  BinomialBlocks(const Call& call, transport::Mesh& mesh, Team team)
      : call_(call), mesh_(mesh), team_(std::move(team)), number_(team_.wrapped(team_.position() - call.root)) {
    std::vector<int>& children = gathers() ? sources_ : targets_;
    std::vector<int>& parent = gathers() ? targets_ : sources_;
    if (number_ > 0) parent.push_back(number_ & (number_ - 1));
    for (int step = 1; step < span(number_); step *= 2) children.push_back(number_ + step);
    sizes_.resize(static_cast<std::size_t>(span(number_)));
    if (gathers()) {
      sizes_[0] = call.inputs[0].bytes;
    } else if (number_ == 0) {
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        sizes_[i] = call.inputs[static_cast<std::size_t>(position(static_cast<int>(i)))].bytes;
      }
    }
    begin(Stage::sizes_in);
  }

  Progress poll(std::int64_t now_ns) override {
    if (gave_up_timer_.is_due(now_ns) && find_gave_up(targets_)) return Progress::failed;
    bool moved = false;
    for (;;) {
      for (auto message = outgoing_.begin(); message != outgoing_.end() && !failure_; ++message) {
        const auto is_before = [&](const Outgoing& other) { return other.peer() == message->peer() && !other.done(); };
        // The blocks wait until the sizes are sent.
        if (message->done() || std::any_of(outgoing_.begin(), message, is_before)) continue;
        const std::size_t bytes = message->advance(mesh_, failure_);
        counts_.wire_bytes += bytes;
        moved |= bytes > 0;
        // A rank that this rank sends to sends nothing but an abort.
        if (failure_) failure_ = read_last_abort(mesh_, message->peer(), call_, std::move(failure_));
      }
      for (Incoming& message : incoming_) {
        if (message.done()) continue;
        Failure reported;
        moved |= message.advance(mesh_, reported) > 0;
        if (reported) failure_ = std::move(reported);
        if (failure_) break;
      }
      if (failure_) return Progress::failed;
      moved |= copies_.advance();
      const auto done = [](const auto& message) { return message.done(); };
      if (!copies_.done() || !std::all_of(incoming_.begin(), incoming_.end(), done)) {
        return moved ? Progress::moved : Progress::idle;
      }
      if (stage_ == Stage::sizes_in && !compare_sizes()) return Progress::failed;
      if (stage_ == Stage::blocks_out) {
        if (!std::all_of(outgoing_.begin(), outgoing_.end(), done)) return moved ? Progress::moved : Progress::idle;
        stage_ = Stage::done;
        return find_gave_up(sources_) || find_gave_up(targets_) ? Progress::failed : Progress::done;
      }
      begin(static_cast<Stage>(static_cast<int>(stage_) + 1));
      moved = true;
    }
  }

  void wait_for(WaitSet& set) const override {
    for (const Outgoing& message : outgoing_) {
      if (!message.done()) mesh_.wait_for(message.peer(), POLLOUT, set.fds);
    }
    for (const Incoming& message : incoming_) {
      if (!message.done()) mesh_.wait_for(message.peer(), POLLIN, set.fds);
    }
    set.wake_at(gave_up_timer_.wake_ns());
    if (!gave_up_timer_.has_looked()) return;
    for (const int target : targets_) mesh_.wait_to_peek(rank(target), set.fds);
  }

  std::vector<int> awaited() const override {
    std::vector<int> ranks;
    for (const Incoming& message : incoming_) {
      if (!message.done()) ranks.push_back(message.peer());
    }
    for (const Outgoing& message : outgoing_) {
      if (ranks.empty() && !message.done()) ranks.push_back(message.peer());
    }
    return ranks;
  }

  // A leaf of a gather and the root of a scatter wait for no other rank.
  bool awaited_may_wait() const override {
    for (std::size_t i = 0; i < incoming_.size(); ++i) {
      if (!incoming_[i].done() && (gathers() ? span(sources_[i]) > 1 : sources_[i] > 0)) return true;
    }
    return false;
  }

 private:
  // A stage ends with its incoming messages; the last stage ends when the sockets have taken all outgoing messages.
  enum class Stage : std::uint8_t { sizes_in, sizes_out, blocks_in, blocks_out, done };

  // Ranks are numbered from the root: 0 is the root. A subtree is the numbers [number, number + span).
  int span(int number) const {
    const int left = team_.size() - number;
    return number == 0 ? left : std::min(left, number & -number);
  }

  bool find_gave_up(const std::vector<int>& numbers) {
    for (const int number : numbers) {
      if (!failure_) failure_ = collective::find_gave_up(mesh_, rank(number), call_);
    }
    return static_cast<bool>(failure_);
  }

  int rank(int number) const { return team_.rank(position(number)); }
  int position(int number) const { return team_.wrapped(call_.root + number); }
  bool gathers() const { return call_.kind == Kind::gather; }
  void begin(Stage stage) {
    stage_ = stage;
    if (stage == Stage::blocks_in) {
      blocks_ =
          std::make_unique_for_overwrite<std::byte[]>(std::accumulate(sizes_.begin(), sizes_.end(), std::size_t{0}));
      if (gathers() || number_ == 0) give_own();
    }
    const bool is_in = stage == Stage::sizes_in || stage == Stage::blocks_in;
    incoming_.clear();
    for (const int peer : is_in ? sources_ : targets_) {
      // Parent and child exchange the child's subtree.
      const int subtree = std::max(peer, number_);
      const bool is_sizes = stage == Stage::sizes_in || stage == Stage::sizes_out;
      const Buffer part = is_sizes ? sizes_of(subtree) : blocks_of(subtree);
      if (is_in) {
        incoming_.emplace_back(call_, rank(peer), part.data, part.bytes);
      } else {
        outgoing_.emplace_back(call_, rank(peer), part.data, part.bytes);
      }
    }
    if (stage == Stage::blocks_out && (!gathers() || number_ == 0)) take_own();
  }

  // Sizes and blocks of the subtree of `number`, inside this rank's.
  Buffer sizes_of(int number) {
    return {reinterpret_cast<std::byte*>(&sizes_[static_cast<std::size_t>(number - number_)]),
            static_cast<std::size_t>(span(number)) * sizeof sizes_[0]};
  }

  Buffer blocks_of(int number) const {
    const auto first = sizes_.begin() + (number - number_);
    const auto before = std::accumulate(sizes_.begin(), first, std::size_t{0});
    return {blocks_.get() + before, std::accumulate(first, first + span(number), std::size_t{0})};
  }

  // Only the root of a gather and the ranks of a scatter know the sizes to expect.
  bool compare_sizes() {
    if (gathers() && number_ > 0) return true;
    const std::size_t count = gathers() ? sizes_.size() : 1;
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(position(static_cast<int>(i)));
      const std::size_t expected = call_.outputs[gathers() ? at : 0].bytes;
      if (sizes_[i] == expected) continue;
      const int peer = gathers() ? team_.rank(static_cast<int>(at)) : rank(0);
      failure_ = mismatch(peer, MessageHeader::of(call_, sizes_[i]), mesh_.rank(), MessageHeader::of(call_, expected));
      return false;
    }
    return true;
  }

  // Begins to copy out this rank's outputs: its own block, or at the root of a gather all blocks.
  void take_own() {
    std::byte* next = blocks_.get();
    const std::size_t count = gathers() ? sizes_.size() : 1;
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(position(static_cast<int>(i)));
      const Buffer& to = call_.outputs[gathers() ? at : 0];
      copies_.add(to, {next, to.bytes});
      next += to.bytes;
    }
  }

  // Begins to copy in this rank's inputs: its own block, or at the root of a scatter all blocks.
  void give_own() {
    std::byte* next = blocks_.get();
    const std::size_t count = gathers() ? 1 : sizes_.size();
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(position(static_cast<int>(i)));
      const Buffer& from = call_.inputs[gathers() ? 0 : at];
      copies_.add({next, from.bytes}, from);
      next += from.bytes;
    }
  }

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  int number_;
  std::vector<int> sources_;             // numbers of the children (gather) or the parent (scatter), ascending
  std::vector<int> targets_;             // of the parent (gather) or the children (scatter)
  std::vector<std::uint64_t> sizes_;     // of the subtree's blocks, by number minus number_
  std::unique_ptr<std::byte[]> blocks_;  // of the subtree, in the same order
  BlockCopies copies_;                   // to or from blocks_
  Stage stage_ = Stage::sizes_in;
  GaveUpTimer gave_up_timer_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;  // from sources_, in stages that receive
};

}  // namespace

std::unique_ptr<Algorithm> make_binomial_blocks(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<BinomialBlocks>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
