// Decides which membership of a switch a rank's operations use, and what each operation does when that is lost.
//
// A pure state machine: a value without socket, clock, thread or payload. A SwitchPath (switch_path.hpp) owns one and does what
// it decides: it freezes channels, starts operations on them and runs host algorithms. The search over recovery
// (netfold/model_check/recovery.py) drives the same class.
//
//   membership  event                        becomes
//   current     freeze                       frozen: nothing is sent or taken
//   frozen      fall_back(end, promised)     down: operations go on one after another, without the switch
//   standing    freeze                       frozen: it can be promised no more
//   standing    fall_back(end, promised)     forgotten; if rank 0 had announced it, that is remembered until it is
//   heard standing    follow(its generation)             current, in place of the one that is down
//
//   operation   event                        becomes
//   (new)       start                        channel while the current membership is not frozen, else undecided
//   channel     fall_back                    host if every rank had begun it, else undecided
//   undecided   follow(0)                    host: the whole call, by a host algorithm
//   undecided   follow(a standing generation)      channel, and so every other operation that are undecided; undecided if it is frozen
//   undecided   follow(a forgotten generation)     undecided: rank 0 will announce once more
//
// The team's first rank announces, before each operation that are undecided, the membership that the operation goes by, or 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace netfold::collective {

class Failover {
 public:
  // By the channel; before the first rank's word; by host algorithms.
  enum class Mode : std::uint8_t { channel, undecided, host };

  explicit Failover(std::uint64_t generation) : current_{.generation = generation} {}

  bool is_up() const { return !current_.frozen; }
  // Whether operations go on without the switch.
  bool is_down() const { return down_; }
  std::uint64_t generation() const { return current_.generation; }

  // --- memberships, each by its generation; 0 is none ---

  enum class Which : std::uint8_t { none, current, standing };
  struct Frozen {
    Which which = Which::none;
    bool promised = false;  // operations run by it, or will once the first rank's word has come
  };
  Frozen freeze(std::uint64_t generation);
  // Whether results of that generation that other ranks kept may still be taken.
  bool accepts_results(std::uint64_t generation) const {
    return generation == current_.generation && current_.frozen && !down_;
  }
  // Whether this rank still has results of that generation to give.
  bool offers_results(std::uint64_t generation) const { return generation == current_.generation; }
  // Goes on without it. `end`: the lowest chunk that some rank had not begun; `promised`: of the first rank.
  Which fall_back(std::uint64_t generation, std::uint64_t end, bool promised);
  void stand_by(std::uint64_t generation) { standing_ = Membership{.generation = generation}; }
  // At the first rank: every rank has it standing by. False where this one has not, or has frozen it.
  bool promise(std::uint64_t generation);
  // At the first rank: what it announces before an operation; it is bound by it at once.
  std::uint64_t announce();

  // --- operations, in order of start, each by a number of the caller's ---

  Mode start(std::uint64_t number);
  // The operation uses the channel from this chunk on.
  void entered(std::uint64_t number, std::uint64_t first_chunk);
  void finish(std::uint64_t number);
  Mode mode(std::uint64_t number) const;
  // The one that may use the spare connections; none while there is a switch, or what ranks have is not yet known.
  std::optional<std::uint64_t> host_operation() const;

  enum class Followed : std::uint8_t { whole, again, adopted, unknown };
  // `announced`: the membership that the first rank announced before the operation. unknown: this rank has none of that
  // number.
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
    std::uint64_t first_chunk = 0;  // while it goes by the channel
    bool operator==(const Operation&) const = default;
  };
  bool stands(std::uint64_t generation) const { return generation != 0 && standing_.generation == generation; }
  Operation& at(std::uint64_t number);

  Membership current_;
  bool down_ = false;
  Membership standing_;
  std::uint64_t promised_ = 0;
  std::uint64_t announced_ = 0;
  // Lost before this rank heard the word that goes by them.
  std::vector<std::uint64_t> lost_;
  std::vector<Operation> operations_;
};

}  // namespace netfold::collective
