// A group's path through a switch, and the replacement for it while the switch is lost.
//
// A SwitchPath has a Channel and, for the time after a loss, connections of its own between the same ranks (`fallback`),
// over which host algorithms run. Operations meant for the switch form a queue of their own either way. So they overlap
// with operations over the mesh as before, and no rank's order of calls on a connection depends on when it noticed a
// loss.
//
//   up       --freeze()-->     frozen   nothing is sent or received; the rank reports its results and gets missing ones
//   frozen   --fall_back()-->  down     the queue's operations continue one after another over the fallback mesh: an
//                                       operation that every rank had begun with the elements that have no result on
//                                       any rank, any other operation as a whole
//   down     --follow-->       up       a membership that stands by is used, from one operation on
//
// The queue itself carries the operation from which on that membership is used: before each whole operation the team's
// first rank sends the other ranks the generation of the membership that the operation uses, or 0. So no two ranks can
// differ about it. netfold/communicator/recovery.py says what each rank must know before it may fall back, and why that
// is the same on every rank.
//
// The state machine Failover (failover.hpp), which has no socket and no payload, makes every decision. A SwitchPath
// carries it out.
#pragma once

#include <netfold/collective/channel.hpp>
#include <netfold/collective/failover.hpp>
#include <netfold/collective/team.hpp>

#include <memory>
#include <optional>
#include <vector>

namespace netfold::collective {

class FailoverOperation;

class SwitchPath {
 public:
  // Borrows the mesh. `choices`: the choice table without the switch, of which only the algorithms count; `table`: its
  // hash.
  SwitchPath(std::unique_ptr<Channel> channel, transport::Mesh& fallback, std::vector<Choice> choices,
             std::uint16_t table);

  bool can_start() const;
  const Channel& channel() const { return *channel_; }
  bool is_up() const { return failover_.is_up(); }

  // Whether a host algorithm of the same operation uses the links to the switch now.
  void share_path(bool with_own) { channel_->share_path(with_own); }

  // The following calls name a membership by its generation (Channel::generation). The driver of the group makes them.

  struct FrozenState {
    Channel::ReceiveState channel;
    bool promised = false;  // Failover::Frozen
  };
  // Stops the membership and returns its state. nullopt: this rank has no such membership.
  std::optional<FrozenState> freeze(std::uint64_t generation);
  // Results that this rank kept, each a packet; nullopt where one of them is not kept.
  std::optional<std::vector<std::vector<std::byte>>> kept(std::uint64_t generation,
                                                          const std::vector<std::uint64_t>& chunks) const;
  // Accepts results that other ranks kept. False where a check of one failed.
  bool accept(std::uint64_t generation, const std::vector<std::span<const std::byte>>& packets, std::int64_t now_ns);
  // Continues without the membership; see Failover::fall_back.
  void fall_back(std::uint64_t generation, std::uint64_t end, bool promised);

  // Adds a membership, which is used as soon as the first rank announces it.
  void stand_by(std::unique_ptr<Channel> channel);
  // At the first rank; see Failover::promise.
  bool promise(std::uint64_t generation) { return failover_.promise(generation); }

 private:
  friend class FailoverOperation;

  Failover failover_;
  std::uint64_t started_ = 0;         // operations so far
  std::unique_ptr<Channel> channel_;  // stays after a loss: other ranks may ask for kept results
  std::unique_ptr<Channel> next_;
  transport::Mesh& fallback_;
  std::vector<Choice> choices_;
  std::uint16_t table_;
  const std::vector<int> ranks_;  // of the switch's job, by position
  const Team team_;
  std::vector<FailoverOperation*> operations_;  // in order of start
};

// One operation of the queue: one operation on the channel, or a host algorithm in its place.
//
// On the channel: one step. Bytes sent by a rank for n bytes of tensor: n and a header a packet, for any number of
// ranks (a ring's all_reduce sends 2n(P-1)/P). contribution_map.hpp says what each operation is to the switch.
class FailoverOperation final : public Algorithm {
 public:
  // Precondition: path.can_start(). Borrows both. The call's root and buffers are indexed by position in the path's team.
  FailoverOperation(const Call& call, SwitchPath& path);
  ~FailoverOperation() override;
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override { return step_ != nullptr && step_->awaited_may_wait(); }
  std::uint64_t settled_bytes() const override {
    return token_ ? counts_before_.wire_bytes + on_channel().result_bytes : counts_.wire_bytes;
  }

 private:
  friend class SwitchPath;
  using Mode = Failover::Mode;

  Mode mode() const { return path_.failover_.mode(number_); }
  // Precondition: token_.
  const Channel::Active& on_channel() const { return path_.channel_->active(*token_); }
  void enter_channel();
  void leave_channel();
  void send_announcement();
  // False, with failure_: this rank has not joined the announced membership.
  bool apply_announcement();
  // Starts a host algorithm: for the call itself, or for the next elements of a begun call that have no result on any
  // rank. False: nothing is left.
  bool start_next_part();
  void deliver_part();
  void run(AlgorithmId algorithm);
  void finish();
  // Sets the counts to those of ended steps plus those of the present step.
  void set_counts(const Counts& of_step);

  const Call& call_;
  SwitchPath& path_;
  const ContributionMap map_;
  std::uint64_t number_ = 0;  // in the queue
  std::optional<int> token_;  // of its operation on the channel
  bool is_whole_ = false;     // no element has a result on any rank: a host algorithm runs the whole call
  bool is_done_ = false;      // the whole call has run
  // The elements without a result on any rank, and those of them that are being reduced now, one after another in
  // scratch.
  std::vector<Range> rest_;
  std::vector<Range> part_;
  std::vector<std::byte> scratch_;
  std::vector<std::byte> staging_;
  std::vector<std::byte> zeros_;
  std::uint64_t announced_ = 0;
  Call step_call_;
  std::unique_ptr<Algorithm> step_;
  Counts counts_before_;  // of ended steps
};

}  // namespace netfold::collective
