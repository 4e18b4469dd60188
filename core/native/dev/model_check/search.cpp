#include <netfold/model_check/search.hpp>

#include "state_set.hpp"
#include "transitions.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <stdexcept>

namespace netfold::model_check {
namespace {

class Search {
 public:
  explicit Search(const Scope& scope)
      : scope_(scope), transitions_(scope), max_states_(scope.max_states == 0 ? kNoId - 1 : scope.max_states) {}

  Report run() {
    const auto start = std::chrono::steady_clock::now();
    safety();
    report_.transitions = transitions_.tried();
    // A rogue worker can always stop its peers: by silence, for one.
    if (report_.broken.empty() && report_.exhausted && !scope_.rogue) {
      scope_.numbers > 0 ? possibility_by_timeouts() : possibility();
    }
    report_.states = states_.size();
    report_.depth = depth_of_last();
    report_.machines = machines_.size();
    report_.switches = transitions_.table.switch_count();
    report_.workers = transitions_.table.worker_count();
    report_.packets = transitions_.table.packet_count();
    report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report_;
  }

 private:
  struct Origin {  // how a state was found first
    Id from = kNoId;
    Transition transition;
  };
  struct Edge {
    Id to = 0;
    Id from = 0;
  };

  // Breadth first: expands states in the order in which they were found; with merged networks a state is expanded again
  // when its network has grown.
  void safety() {
    add(transitions_.first(), {});
    while (!due_.empty()) {
      const Id at = due_.front();
      due_.pop_front();
      is_due_[at] = false;
      State state = states_[at];
      state.network = networks_[at];
      transitions_.each(state, [&](const Transition& transition, const State& next, const std::string& broken) {
        if (broken.empty()) return add(next, {at, transition});
        report_.broken = broken;
        report_.trace = trace(at, &transition);
        return false;
      });
      if (!report_.broken.empty() || states_.size() >= max_states_) return;
    }
    report_.exhausted = true;
  }

  bool add(const State& state, const Origin& origin) {
    State machines = state;
    machines.network = 0;
    const auto [id, added] = states_.add(scope_.network == Network::merged ? machines : state);
    if (added) {
      origins_.push_back(origin);
      networks_.push_back(state.network);
      is_due_.push_back(true);
      due_.push_back(id);
      if (machines_.add(machines).second) first_states_.push_back(id);
    } else if (scope_.network == Network::merged) {
      const Id merged = transitions_.table.network_with(networks_[id], transitions_.table.network(state.network));
      if (merged != networks_[id] && !is_due_[id]) {
        is_due_[id] = true;
        due_.push_back(id);
      }
      networks_[id] = merged;
    }
    return states_.size() < max_states_;
  }

  void possibility() {
    const bool without_network = scope_.network != Network::exact;
    const StateSet& from = without_network ? machines_ : states_;
    std::vector<Edge> edges;
    for (Id at = 0; at < from.size(); ++at) {
      const auto visit = [&](const Transition& transition, const State& next, const std::string&) {
        if (transition.is_fault() || next == from[at]) return true;
        edges.push_back({from.find(next), at});
        if (edges.back().to == kNoId) throw std::logic_error("a transition leads out of the searched states");
        return true;
      };
      if (without_network) {
        transitions_.each_without_network(from[at], visit);
      } else {
        transitions_.each(from[at], visit);
      }
    }
    const Id stuck = first_without_a_path(from, edges);
    if (stuck == kNoId) return;
    report_.broken = kStuck;
    report_.trace = trace(without_network ? first_states_[stuck] : stuck, nullptr);
  }

  // In a scope with numbers each state is played to its own end, by as many timeouts as that takes.
  void possibility_by_timeouts() {
    for (Id at = 0; at < machines_.size(); ++at) {
      const State& state = machines_[at];
      const std::vector<Id> leaves(state.leaves.begin(), state.leaves.begin() + scope_.leaves.size());
      const std::vector<Id> workers(state.workers.begin(), state.workers.begin() + scope_.workers);
      report_.broken = transitions_.table.broken_by_timeouts(state.machine, leaves, workers);
      if (report_.broken.empty()) continue;
      report_.trace = trace(first_states_[at], nullptr);
      return;
    }
  }

  // Returns the first state without a path to a finished state, or kNoId.
  Id first_without_a_path(const StateSet& states, std::vector<Edge>& edges) const {
    std::ranges::sort(edges, {}, &Edge::to);
    std::vector<bool> has_path(states.size());
    std::vector<Id> reached;
    for (Id at = 0; at < states.size(); ++at) {
      if (transitions_.finished(states[at])) {
        has_path[at] = true;
        reached.push_back(at);
      }
    }
    while (!reached.empty()) {
      const Id to = reached.back();
      reached.pop_back();
      for (auto edge = std::ranges::lower_bound(edges, to, {}, &Edge::to); edge != edges.end() && edge->to == to;
           ++edge) {
        if (has_path[edge->from]) continue;
        has_path[edge->from] = true;
        reached.push_back(edge->from);
      }
    }
    const auto stuck = std::ranges::find(has_path, false);
    return stuck == has_path.end() ? kNoId : static_cast<Id>(stuck - has_path.begin());
  }

  std::vector<Transition> path_to(Id state) const {
    std::vector<Transition> transitions;
    for (; origins_[state].from != kNoId; state = origins_[state].from)
      transitions.push_back(origins_[state].transition);
    std::ranges::reverse(transitions);
    return transitions;
  }

  std::vector<std::string> trace(Id state, const Transition* last) {
    std::vector<Transition> transitions = path_to(state);
    if (last != nullptr) transitions.push_back(*last);
    return trace_steps(transitions_, transitions);
  }

  std::uint32_t depth_of_last() const {
    return states_.size() == 0 ? 0 : static_cast<std::uint32_t>(path_to(static_cast<Id>(states_.size() - 1)).size());
  }

  Scope scope_;
  Transitions transitions_;
  std::uint64_t max_states_;
  Report report_;
  StateSet states_;
  std::vector<Origin> origins_;   // by state
  std::vector<Id> networks_;      // by state
  std::vector<bool> is_due_;      // by state
  std::deque<Id> due_;            // states to expand
  StateSet machines_;             // states without their networks
  std::vector<Id> first_states_;  // by machines_: the first state that has these machines
};

}  // namespace

Report search(const Scope& scope) { return Search(scope).run(); }

}  // namespace netfold::model_check
