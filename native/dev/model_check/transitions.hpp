// States of the search, and the events that lead from one to the next.
#pragma once

#include "state_table.hpp"

#include <array>
#include <functional>

namespace netfold::model_check {

// Numbers of the parts: those beyond the scope's workers and leaves are zero.
struct State {
  Id machine = 0;  // the switch's, or the root's
  Id network = 0;
  std::array<Id, kMaxWorkers> workers{};
  std::array<Id, kMaxLeaves> leaves{};
  bool operator==(const State&) const = default;
};

struct Transition {
  enum class Kind : std::uint8_t {
    deliver,
    copy,
    lose,
    timeout,
    call,
    hear,
    rejoin,
    rejoin_leaf,
    restart_group,
    restart_switch,
    restart_leaf
  };
  Kind kind = Kind::deliver;
  std::uint32_t what = 0;   // deliver, copy, lose: a packet; rejoin_leaf, restart_leaf: a leaf; else a worker
  std::uint32_t times = 0;  // ring: how many timers, one after the other

  // Of network or machines: what no way to the end may count on.
  bool is_fault() const { return kind == Kind::copy || kind == Kind::lose || kind >= Kind::restart_group; }
};

class Transitions {
 public:
  explicit Transitions(const Scope& scope) : table(scope), scope_(scope) {}

  State first();
  // What `move` makes of `state`; the second is the step of the machine that it happens to.
  std::pair<State, Step> done(const State& state, const Transition& transition);
  // The move and what it leads to, for every one there is, but deliveries that change nothing. Ends when `visit`
  // returns false.
  using Visit = std::function<bool(const Transition&, const State&, const std::string& broken)>;
  void each(const State& state, const Visit& visit);
  // Where the machines of `state` can get by themselves, its network being lost: a worker calls, rejoins or sends
  // again, and what that makes the machines send arrives, up to a point.
  void each_without_network(const State& state, const Visit& visit);

  bool finished(const State& state) const;
  const Scope& scope() const { return scope_; }

  // Moves that `each` has looked at, those included that change nothing.
  std::uint64_t tried() const { return tried_; }

  StateTable table;

 private:
  // Where the packet arrives.
  Id& place_of(State& state, const Packet& packet) const;
  const Step& delivered(const State& state, Id packet);
  // The worker's switch, or its leaf.
  Id machine_of(const State& state, std::uint16_t worker) const;
  bool rejoins(const State& state, std::uint16_t worker) const;
  bool leaf_rejoins(const State& state, std::uint16_t leaf) const;
  bool can_hear(const State& state, std::uint16_t worker) const;

  Scope scope_;
  std::uint64_t tried_ = 0;
};

}  // namespace netfold::model_check
