// Collectives of ranks on several hosts, some of which share memory. Inside a host the data go through memory. Between
// hosts one rank of each host, its leader, exchanges them; in an all_reduce among hosts with equally many ranks every
// rank does. A call is a list of stages, each a call of its own inside the host or among the leaders, by an algorithm
// chosen for that.
//
//   all_reduce      Hosts of L ranks each: reduce-scatter inside (rank p keeps part p), an all_reduce of part p among
//                   the p-th ranks of all hosts, all L of them at once, all-gather inside. On uneven hosts, and where a
//                   switch adds between hosts: reduce inside, all_reduce among the leaders, broadcast inside.
//   reduce          Inside, then among the leaders. The root leads its host. Through a switch, which only each host's
//                   first rank joined, the first rank of the root's host passes the result to the root.
//   broadcast       Among the leaders, then inside. The root leads its host. Through a switch the root first sends to
//                   its host.
//   all_gather      Gather inside, all_gather of each host's blocks among the leaders, broadcast inside.
//   reduce_scatter  Reduce inside, reduce_scatter of each host's blocks among the leaders, scatter inside.
//   gather          Sizes inside, so that the leader can allocate its host's blocks; blocks inside; then among the
//                   leaders, each host's sizes before its blocks. The root leads its host.
//   scatter         Each host's sizes among the leaders, then its blocks; inside. The root leads its host.
//   all_to_all      Inside; then every rank with all ranks of other hosts.
//   barrier         Inside, among the leaders, inside.
//
// Steps: those of the algorithm between hosts, and one or two through memory. Bytes sent by a host: as many as that
// algorithm sends among as many ranks as there are hosts (all_to_all: what the host's ranks give to other hosts).
//
// The blocks of a host's ranks travel as one. Where a call's buffers are not laid out in memory host by host, they are
// copied to or from scratch of n bytes. A leader's sums need n bytes of their own (reduce: unless it is the root).
// (Hierarchical collectives: Karonis et al., 2000.)
#pragma once

#include <netfold/collective/call_sequence.hpp>
#include <netfold/collective/host_map.hpp>
#include <netfold/collective/registry.hpp>

namespace netfold::collective {

class Hierarchical final : public CallSequence {
 public:
  // Borrows the call and what the paths point to. `paths.nodes` gives each rank's host.
  Hierarchical(const Call& call, const Paths& paths);
  bool awaited_may_wait() const override;

 private:
  enum class Action : std::uint8_t { inside, between, copy, divide, plan_rest, unpack };
  struct Stage {
    Action action;
    Kind kind = Kind::barrier;
    int root = 0;  // a position on the host or in the team
    std::vector<Buffer> inputs;
    std::vector<Buffer> outputs;  // copy: of each input; divide: of each by the number of ranks
  };

  void plan();
  void plan_all_reduce();
  void plan_reduce();
  void plan_broadcast();
  void plan_all_gather();
  void plan_reduce_scatter();
  void plan_gather();
  void plan_scatter();
  void plan_all_to_all();
  void plan_barrier();
  // The rest of a gather or scatter on a leader, which by then has the sizes of its host's blocks.
  void plan_rest_of_gather();
  void plan_rest_of_scatter();
  // At the root of a gather: copies the blocks of other hosts to the outputs, if the sizes are as expected.
  void unpack();

  void inside(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs);
  // Left out on ranks that are no leaders.
  void between(Kind kind, int root, std::vector<Buffer> inputs, std::vector<Buffer> outputs);
  void copy(std::vector<Buffer> to, std::vector<Buffer> from);
  void divide_by_ranks(const Buffer& buffer);
  bool start_next() override;
  void start(const Stage& stage);

  int rank() const { return paths_.mesh.rank(); }
  // A switch adds for one rank per host, always the same: the first rank, which joined the switch.
  bool goes_by_switch() const {
    return call_.between == AlgorithmId::in_network || call_.between == AlgorithmId::split;
  }
  // Makes the root the leader of its host, unless the call goes by a switch.
  void choose_leaders();
  bool is_leader() const { return team_[hosts_.own()] == rank(); }
  // The leader's position on this host.
  int leader_inside() const { return static_cast<int>(hosts_.position(team_[hosts_.own()])); }
  // The root is on this host, and another rank is the leader.
  bool root_is_led() const { return hosts_.host_of(call_.root) == hosts_.own() && team_[hosts_.own()] != call_.root; }
  // The team's position of the leader of the root's host.
  int root_in_team() const { return static_cast<int>(hosts_.host_of(call_.root)); }
  HostMap::Blocks scratch_for(const std::vector<Buffer>& buffers);
  Buffer scratch(std::size_t bytes);
  Buffer size_table() { return {reinterpret_cast<std::byte*>(sizes_.data()), sizes_.size() * sizeof sizes_[0]}; }

  const Call& call_;
  const Paths paths_;
  const HostMap hosts_;
  std::vector<int> team_;  // the ranks that exchange between hosts, by host
  std::unique_ptr<std::byte[]> scratch_;
  // Of the blocks of a gather or scatter: this host's, or all at the root of a scatter, by host.
  std::vector<std::uint64_t> sizes_;
  std::vector<Stage> stages_;
  std::size_t next_ = 0;  // of the stages
};

}  // namespace netfold::collective
