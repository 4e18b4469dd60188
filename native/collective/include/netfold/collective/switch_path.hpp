// A group's way to add in the network, and what takes its place while there is no switch.
//
// A SwitchPath has a Channel or, when its switch is lost, connections of its own between the same ranks (`fallback`), over
// which host algorithms run. Operations meant for the switch stay in a line of their own either way, so they and those
// over the mesh overlap as ever, and no rank's order of calls on a connection depends on when it heard of a loss.
//
//   up        --freeze()-->      frozen    nothing is sent or taken; what this rank has is said, what it lacks comes in
//   frozen    --fall_back()-->   down      each operation of the line goes on, one after another, over the fallback mesh:
//                                          one that every rank had begun with the elements that have no result
//                                          anywhere, any other as a whole
//   down      --adopt()-->       up        by a membership that stands by, from one operation on
//
// From which operation on, is said in the line itself: before each whole one the team's first rank sends the others a
// word: the generation of the membership that it goes by, or 0. So no two ranks can differ about it. What each rank must know
// before it may fall back, and why that is the same everywhere: netfold/communicator/recovery.py.
//
// Every decision of this is the state machine Failover (failover.hpp), which has no socket and no payload; a SwitchPath
// carries out what it decides.
#pragma once

#include <netfold/collective/failover.hpp>
#include <netfold/collective/in_network.hpp>
#include <netfold/collective/team.hpp>

#include <memory>
#include <optional>
#include <vector>

namespace netfold::collective {

class FailoverOperation;

class SwitchPath {
 public:
  // Of the table that holds while there is no switch: from `min_bytes` on, by `algorithm`. Ascending; the first at 0.
  struct Row {
    Kind kind = Kind::all_reduce;
    std::uint64_t min_bytes = 0;
    AlgorithmId algorithm = AlgorithmId::direct;
  };
  // Borrows the mesh. `table`: the hash of the rows.
  SwitchPath(std::unique_ptr<Channel> channel, transport::Mesh& fallback, std::vector<Row> rows, std::uint16_t table);

  bool can_start() const;
  const Channel& channel() const { return *channel_; }
  bool is_up() const { return failover_.is_up(); }

  // Whether a host algorithm of the same operation uses the path to the switch now.
  void share_path(bool with_own) { channel_->share_path(with_own); }

  // What follows is said of a membership by its generation (Channel::generation), and comes from whoever drives.

  struct FrozenState {
    Channel::ReceiveState channel;
    bool promised = false;  // operations run by it, or will once the first rank's word has come
  };
  // Stops the membership; what this rank has of it. nullopt: it has no such membership (any more).
  std::optional<FrozenState> freeze(std::uint64_t generation);
  // Results that this rank kept, each a packet; nullopt where one is not kept.
  std::optional<std::vector<std::vector<std::byte>>> kept(std::uint64_t generation,
                                                          const std::vector<std::uint64_t>& chunks) const;
  // Results that other ranks kept. False where one was not for this rank.
  bool accept(std::uint64_t generation, const std::vector<std::span<const std::byte>>& packets, std::int64_t now_ns);
  // Goes on without it. `end`: the lowest chunk that some rank had not begun; `promised`: of the team's first rank.
  void fall_back(std::uint64_t generation, std::uint64_t end, bool promised);

  // A membership to go on by, as soon as the first rank says so.
  void stand_by(std::unique_ptr<Channel> channel);
  // At the first rank: every rank has it standing by. False where this one has not, or has frozen it.
  bool promise(std::uint64_t generation) { return failover_.promise(generation); }

 private:
  friend class FailoverOperation;

  AlgorithmId choose(Kind kind, std::size_t bytes) const;

  Failover failover_;
  std::uint64_t started_ = 0;         // operations, ever
  std::unique_ptr<Channel> channel_;  // frozen, it stays: others may ask for what it keeps
  std::unique_ptr<Channel> next_;
  transport::Mesh& fallback_;
  std::vector<Row> rows_;
  std::uint16_t table_;
  Team team_;
  std::vector<FailoverOperation*> operations_;  // in order of start
};

// One operation of the line.
class FailoverOperation final : public Algorithm {
 public:
  // Precondition: uplink.can_start(). Borrows both. `position` of `ranks`: as in the call's root and buffers.
  FailoverOperation(const Call& call, SwitchPath& path, int position, int ranks);
  ~FailoverOperation() override;
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override { return step_ != nullptr && step_->awaited_may_wait(); }
  std::uint64_t settled_bytes() const override {
    return in_network_ == nullptr ? wire_bytes_ : wire_bytes_before_ + in_network_->settled_bytes();
  }

 private:
  friend class SwitchPath;
  using Mode = Failover::Mode;

  Mode mode() const { return path_.failover_.mode(number_); }
  void enter_channel();
  void leave_channel();
  void send_announcement();
  // False: this rank cannot follow.
  bool apply_announcement();
  // By a host algorithm: the call itself, or, of one that was begun, the next of what no rank has a result of. False:
  // nothing is left.
  bool start_next_part();
  void put_back();
  void run(AlgorithmId algorithm);
  void finish();
  void take_counts(const Algorithm& of);

  const Call& call_;
  SwitchPath& path_;
  const int position_;
  const int ranks_;
  const ContributionMap map_;
  std::uint64_t number_ = 0;  // in the line
  std::unique_ptr<InNetwork> in_network_;
  bool is_whole_ = false;  // nothing of it has a result anywhere: the host algorithm is the call's own
  bool is_done_ = false;   // and has run
  // What no rank has a result of, and what of it is being reduced now, side by side in scratch as it is on the line.
  std::vector<Range> rest_;
  std::vector<Range> part_;
  std::vector<std::byte> scratch_;
  std::vector<std::byte> staging_;
  std::vector<std::byte> zeros_;
  std::uint64_t announced_ = 0;
  Call step_call_;
  std::unique_ptr<Algorithm> step_;
  std::uint64_t wire_bytes_before_ = 0;  // of what is over
  std::uint32_t retransmissions_before_ = 0;
};

}  // namespace netfold::collective
