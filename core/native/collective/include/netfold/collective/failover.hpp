// Decides which switch membership a rank's operations use, and how each operation continues when the membership is
// lost.
//
// A pure state machine: a value without socket, clock, thread or payload. A SwitchPath (switch_path.hpp) owns one and
// carries out its decisions: it freezes channels, starts operations on them and runs host algorithms. The search over
// recovery (lab/src/netfold_lab/model_check/recovery.py) drives the same class.
//
// A rank has a current membership and at most one that stands by, each named by its generation.
//
//   membership  event                        becomes
//   current     freeze                       frozen: nothing is sent or received
//   frozen      fall_back(end, promised)     down: operations run one after another, without the switch
//   standing    freeze                       frozen: it can no longer be promised
//   standing    fall_back(end, promised)     forgotten; if rank 0 had announced it, remembered until this rank reads
//                                            that announcement
//   standing    follow(its generation)       current; replaces the membership that is down
//
//   operation   event                        becomes
//   (new)       start                        channel while the current membership is not frozen, else undecided
//   channel     fall_back                    host if every rank had begun it, else undecided
//   undecided   follow(0)                    host: the whole call, by a host algorithm
//   undecided   follow(a standing            channel, and so does every other undecided operation; undecided if the
//               generation)                  membership is frozen
//   undecided   follow(a forgotten           undecided: rank 0 will announce again
//               generation)
//
// Before each undecided operation, the team's first rank announces the generation that the operation uses, or 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace netfold::collective {

class Failover {
 public:
  // Through the channel; waiting for the first rank's announcement; by host algorithms.
  enum class Mode : std::uint8_t { channel, undecided, host };

  explicit Failover(std::uint64_t generation) : current_{.generation = generation} {}

  bool is_up() const { return !current_.frozen; }
  // Whether operations run without the switch.
  bool is_down() const { return down_; }
  std::uint64_t generation() const { return current_.generation; }

  // --- memberships, by generation; 0 is none ---

  enum class Which : std::uint8_t { none, current, standing };
  struct Frozen {
    Which which = Which::none;
    bool promised = false;  // operations use it, or will once the first rank's announcement arrives
  };
  Frozen freeze(std::uint64_t generation);
  // Whether this rank may still accept results of that generation that other ranks kept.
  bool accepts_results(std::uint64_t generation) const {
    return generation == current_.generation && current_.frozen && !down_;
  }
  // Whether this rank still keeps results of that generation.
  bool offers_results(std::uint64_t generation) const { return generation == current_.generation; }
  // Continues without the membership.
  // end: the lowest chunk that some rank had not begun.
  // promised: Frozen::promised of the first rank.
  Which fall_back(std::uint64_t generation, std::uint64_t end, bool promised);
  void stand_by(std::uint64_t generation) { standing_ = Membership{.generation = generation}; }
  // At the first rank: on every rank the membership stands by. False where it does not on this rank, or is frozen.
  bool promise(std::uint64_t generation);
  // At the first rank: what it announces before an operation. The announcement binds it at once.
  std::uint64_t announce();

  // --- operations, in order of start, by numbers that the caller gives ---

  Mode start(std::uint64_t number);
  // The operation uses the channel from this chunk on.
  void entered(std::uint64_t number, std::uint64_t first_chunk);
  void finish(std::uint64_t number);
  Mode mode(std::uint64_t number) const;
  // The one operation that may use the spare connections. None while the switch is used, or while the ranks have not
  // fallen back yet.
  std::optional<std::uint64_t> host_operation() const;

  enum class Followed : std::uint8_t { whole, again, adopted, unknown };
  // `announced`: the generation that the first rank announced before the operation. unknown: this rank has no such
  // membership.
  Followed follow(std::uint64_t number, std::uint64_t announced);

  bool operator==(const Failover&) const = default;
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  struct Membership {
    std::uint64_t generation = 0;
    bool frozen = false;
    bool operator==(const Membership&) const = default;
  };
  struct Operation {
    std::uint64_t number = 0;
    Mode mode = Mode::undecided;
    std::uint64_t first_chunk = 0;  // while it uses the channel
    bool operator==(const Operation&) const = default;
  };
  bool stands(std::uint64_t generation) const { return generation != 0 && standing_.generation == generation; }
  Operation& at(std::uint64_t number);

  Membership current_;
  bool down_ = false;
  Membership standing_;
  std::uint64_t promised_ = 0;
  std::uint64_t announced_ = 0;
  // Announced and lost, before this rank read the announcement.
  std::vector<std::uint64_t> lost_;
  std::vector<Operation> operations_;
};

}  // namespace netfold::collective
