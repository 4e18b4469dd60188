// States of the search, and the events that lead from one to the next.
#pragma once

#include "state_table.hpp"

#include <array>
#include <functional>

namespace netfold::model_check {

// The numbers of the machines and the network; 0 beyond the scope's workers and leaves.
struct State {
  Id machine = 0;  // of the switch, or the root
  Id network = 0;
  std::array<Id, kMaxWorkers> workers{};
  std::array<Id, kMaxLeaves> leaves{};
  Id outlived = kNoId;  // the pipeline of the generation before, which goes on
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
  std::uint32_t what = 0;   // deliver, copy, lose: a packet; rejoin_leaf, restart_leaf: a leaf; otherwise a worker
  std::uint32_t times = 0;  // timeout: how many, one after the other

  // A fault of the network or of a machine, on which no path to the end may rely.
  bool is_fault() const { return kind == Kind::copy || kind == Kind::lose || kind >= Kind::restart_group; }
};

class Transitions {
 public:
  explicit Transitions(const Scope& scope) : table(scope), scope_(scope) {}

  State first();
  // Returns the state after `transition`, and the step of the machine that it happens to.
  std::pair<State, Step> apply(const State& state, const Transition& transition);
  // Visits every possible transition with the state after it, except deliveries without effect, until `visit` returns
  // false.
  using Visit = std::function<bool(const Transition&, const State&, const std::string& broken)>;
  void each(const State& state, const Visit& visit);
  // Visits the states that the machines can reach without the network's packets, which are lost: a worker calls,
  // rejoins or sends again, and the packets that follow arrive one after the other.
  void each_without_network(const State& state, const Visit& visit);

  bool finished(const State& state) const;
  const Scope& scope() const { return scope_; }

  // The machine at which the packet arrives.
  Id& destination(State& state, const Packet& packet) const;

  // Transitions that `each` has tried, those without effect included.
  std::uint64_t tried() const { return tried_; }

  StateTable table;

 private:
  const Step& delivery(const State& state, Id packet);
  // The worker's switch, or leaf.
  Id switch_of(const State& state, std::uint16_t worker) const;
  bool rejoins(const State& state, std::uint16_t worker) const;
  bool leaf_rejoins(const State& state, std::uint16_t leaf) const;
  bool can_hear(const State& state, std::uint16_t worker) const;

  Scope scope_;
  std::uint64_t tried_ = 0;
};

// Returns the steps of a path from the first state, as `replay` takes them.
std::vector<std::string> trace_steps(Transitions& transitions, const std::vector<Transition>& path);

}  // namespace netfold::model_check
