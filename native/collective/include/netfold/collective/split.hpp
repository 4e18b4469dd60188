// A large all_reduce in two ways at once: a part of it through the switches, the rest round a ring, over the same
// links.
//
// A switch behind a link of c times a rank's takes n P / (c b) seconds for n bytes of P ranks, a ring 2 n (P-1) / (P
// b). Together, each with the part that lets both end at once, they take less than either: Shares says which. Steps and
// bytes are those of the two parts.
//
// What each way did is agreed on after the first operations, then now and then, by an all_reduce of a few words over
// the mesh. Every rank gives the rates that it saw, and the greatest count, since a rank that came late has waited
// least; of what was left when the other way had ended the least, since that is at another moment on each rank. Shares
// learns from them, so all ranks cut the next operation alike. Where a switch is lost its part goes round the ring as
// well, over connections of its own (switch_path.hpp), and nothing is learned.
#pragma once

#include <netfold/collective/registry.hpp>
#include <netfold/collective/sharded.hpp>
#include <netfold/collective/shares.hpp>

#include <memory>
#include <vector>

namespace netfold::collective {

class Split final : public Algorithm {
 public:
  // Smaller operations teach nothing: latency is most of them, and buffers on the way take them whole.
  static constexpr std::size_t kLearnBytes = 1 << 20;

  // Borrows the call, an all_reduce with elements, and what the paths point to. Preconditions: shares, an uplink each.
  Split(const Call& call, const Paths& paths, Team team);
  ~Split() override;
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;
  bool on_mesh() const override { return !host_done_ || agrees_; }
  void wait_for_mesh() override { parts_->hold(switches_, true); }
  void take_mesh() override { parts_->hold(switches_, false); }

  // Whether the ranks will agree on what this call did: the next is cut by that, and begins after it.
  static bool updates_shares(const Call& call, const Shares& shares) {
    return call.choice_bytes() >= kLearnBytes && shares.learns();
  }

 private:
  // Less than one part in kLeastTime of the whole time is too short to tell a rate.
  static constexpr std::int64_t kLeastTime = 16;

  Progress poll_parts(std::int64_t now_ns);
  void note_ends();
  void share_path(bool with_own);
  void start_agreement();
  void learn();

  const Call& call_;
  const Paths paths_;
  const Team team_;
  const std::size_t switches_;
  const bool agrees_;
  std::unique_ptr<Sharded> parts_;
  bool host_done_ = false;      // has no part, or is through
  bool switches_done_ = false;  // likewise all of them
  std::uint64_t wire_bytes_of_parts_ = 0;
  // Of each way its rate beside the others and its rate alone, negative where it was not alone from the start; then
  // whether a switch was lost meanwhile.
  std::vector<std::int64_t> words_;
  Call agreement_call_;
  std::unique_ptr<Algorithm> agreement_;
};

}  // namespace netfold::collective
