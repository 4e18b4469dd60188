// A large all_reduce over two paths at once: a part of it through the switches, the rest round a ring, over the same
// links.
//
// A switch behind a link of c times a rank's link takes n P / (c b) seconds for n bytes of P ranks; a ring takes
// 2 n (P-1) / (P b). Together, each with the part that lets both end at once, they take less time than either alone.
// Shares gives the parts. Steps and bytes are those of the two parts.
//
// The ranks agree on the rates of each path after the first operations, and then after those that Shares selects, by an
// all_reduce of 2 (S + 1) + 1 integers for S switches over the mesh. Every rank gives the rates that it saw. The
// largest rate counts, since a rank that began late has waited least. Of the rest that a path did alone the smallest
// rate counts, since each rank sees the other path end at another moment. Shares learns from the agreed rates, so all
// ranks cut the next operation alike. Where a switch is lost, its part goes round the ring too, over connections of its
// own (switch_path.hpp), and nothing is learned.
#pragma once

#include <netfold/collective/registry.hpp>
#include <netfold/collective/sharded.hpp>
#include <netfold/collective/shares.hpp>

#include <memory>
#include <vector>

namespace netfold::collective {

class Split final : public Algorithm {
 public:
  // Smaller operations give no rates: they are mostly latency, and fit whole into buffers on the path.
  static constexpr std::size_t kLearnBytes = 1 << 20;

  // Borrows the call, an all_reduce with elements, and what the paths point to. Precondition: paths.shares is set, for
  // as many switches as there are switch paths.
  Split(const Call& call, const Paths& paths, Team team);
  ~Split() override;
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;
  bool on_mesh() const override { return !host_done_ || agrees_; }
  void wait_for_mesh() override { parts_->hold(switches_, true); }
  void take_mesh() override { parts_->hold(switches_, false); }

  // Whether the ranks agree on the rates of this call. The next call is cut by them, and begins after the agreement.
  static bool updates_shares(const Call& call, const Shares& shares) {
    return call.choice_bytes() >= kLearnBytes && shares.learns();
  }

 private:
  // A time below the whole time / kLeastTime is too short to measure a rate.
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
  bool host_done_ = false;      // has no part, or is done
  bool switches_done_ = false;  // the same of all switches
  // All ranks agree on these. For each path: its rate beside the other paths, and its rate alone, negative where it was
  // not alone from the start. Last: 1 where a switch was lost.
  std::vector<std::int64_t> rates_;
  Call agreement_call_;
  std::unique_ptr<Algorithm> agreement_;
};

}  // namespace netfold::collective
