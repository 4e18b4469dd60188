// Collectives of ranks on several hosts, some of which share memory: inside a host through memory, between hosts one
// rank of each speaks for all of them, or, in an all_reduce among hosts with equally many ranks, all at once. A call is
// a list of stages, each a call of its own inside the host or among the speakers, by the algorithms there are for that.
//
//   all_reduce      Hosts of L ranks each: reduce-scatter inside (rank p keeps part p), an all_reduce of part p among
//                   the p-th ranks of all hosts, all L of them at once, all-gather inside. Elsewhere, and where a
//                   switch adds between hosts: reduce inside, all_reduce among the speakers, broadcast inside.
//   reduce          inside, then among the speakers. The root speaks for its host; where only first ranks can (through
//                   a switch), its host's gives it the result.
//   broadcast       among the speakers, then inside. The root speaks for its host; where only first ranks can, its host
//                   has it from the root first.
//   all_gather      gather inside, all_gather of what each host has, broadcast inside
//   reduce_scatter  reduce inside, reduce_scatter of what each host wants, scatter inside
//   gather          sizes inside, so that the speaker has room for its host's blocks; blocks inside; then among the
//                   speakers, each host's sizes before its blocks. The root speaks for its host.
//   scatter         each host's sizes among the speakers, then its blocks; inside. The root speaks for its host.
//   all_to_all      inside; then with everybody else, each rank for itself
//   barrier         inside, among the speakers, inside
//
// Steps: those of the algorithm between hosts, and one or two through memory. Bytes a host sends: what that algorithm
// sends among as many ranks as there are hosts (all_to_all: what its ranks give to other hosts).
//
// The blocks of a host's ranks travel as one. Where a call's buffers do not lie in memory host by host they are copied
// to or from scratch of n bytes, and a speaker's sums need n bytes of their own (reduce: unless it is the root).
// (Hierarchical collectives: Karonis et al., 2000.)
#pragma once

#include <netfold/collective/registry.hpp>

#include <optional>

namespace netfold::collective {

class Hierarchical final : public Algorithm {
 public:
  // Borrows the call and what the paths point to. `paths.nodes` names each rank's host.
  Hierarchical(const Call& call, const Paths& paths);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  enum class Where : std::uint8_t { inside, between, copy, divide, plan_rest, unpack };
  struct Stage {
    Where where;
    Kind kind = Kind::barrier;
    int root = 0;  // a position in the host or in the team
    std::vector<Buffer> inputs;
    std::vector<Buffer> outputs;  // copy: of each input; divide: of each by the number of ranks
  };
  // A buffer for each rank, those of a host side by side.
  struct Blocks {
    std::vector<Buffer> of_rank;
    std::vector<Buffer> of_host;
    Buffer whole;
  };

  void plan();
  void plan_all_reduce();
  void plan_reduce();
  void plan_broadcast();
  void plan_all_gather();
  void plan_reduce_scatter();
  void plan_gather();
  void plan_scatter();
  // Of a gather or scatter, on a rank that speaks: once it has heard the sizes of its host's blocks.
  void plan_gathered();
  void plan_scattered();
  // At the root of a gather: what came from other hosts, if it has the sizes that this rank expects.
  void unpack();
  void plan_all_to_all();
  void plan_barrier();

  void inside(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs);
  // Left out on ranks that do not speak.
  void between(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs);
  void copy(std::vector<Buffer> to, std::vector<Buffer> from);
  void divide_by_ranks(const Buffer& buffer);

  // `root` speaks for its host, the first rank for every other; through a switch, which they alone joined, the first
  // rank for each.
  void choose_leaders(int root);
  // One rank a host goes between them, always the same: the one that joined the switch.
  bool goes_by_switch() const {
    return call_.between == AlgorithmId::in_network || call_.between == AlgorithmId::split;
  }
  bool is_leader() const { return team_[host_] == paths_.mesh.rank(); }
  std::size_t host_of(int rank) const;
  // Of a rank of this host.
  std::size_t position_inside(int rank) const;
  int leader_inside() const;
  // The root is on this host, and another rank speaks for it.
  bool root_is_led() const;
  // The buffers as they are where each begins where the one before it, host by host, ends; else empty.
  std::optional<Blocks> lying_together(const std::vector<Buffer>& buffers) const;
  // Scratch for buffers of the same sizes.
  Blocks scratch_for(const std::vector<Buffer>& buffers);
  Buffer scratch(std::size_t bytes);
  std::vector<Buffer> of_this_host(const std::vector<Buffer>& of_ranks) const;
  // Of its host's speaker.
  int root_in_team() const;
  std::vector<Buffer> size_words();
  void start(const Stage& stage);

  const Call& call_;
  const Paths paths_;
  std::vector<std::vector<int>> hosts_;  // ranks of each, ascending
  std::size_t host_ = 0;                 // of this rank
  int position_ = 0;                     // of this rank on its host
  std::vector<int> team_;                // who runs what is between hosts
  std::unique_ptr<std::byte[]> scratch_;
  // Of a gather's or scatter's blocks: of this host, or, at the root, of all, by host.
  std::vector<std::uint64_t> sizes_;
  std::vector<Stage> stages_;
  std::size_t next_ = 0;  // of the stages
  Call step_call_;
  std::unique_ptr<Algorithm> step_;  // null where the stage has nothing to do
};

}  // namespace netfold::collective
