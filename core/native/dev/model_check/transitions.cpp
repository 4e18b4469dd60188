#include "transitions.hpp"

namespace netfold::model_check {

using Kind = Transition::Kind;

State Transitions::first() {
  State state{.machine = table.new_switch(Generation{}, 0), .network = table.network_of({})};
  state.network = table.network_with(state.network, table.first_packets());
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    state.leaves[leaf] = table.new_leaf(state.machine, leaf);
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    state.workers[worker] = table.new_worker(switch_of(state, worker), worker);
  }
  return state;
}

bool Transitions::finished(const State& state) const {
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    if (leaf_rejoins(state, leaf)) return false;
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    if (rejoins(state, worker) || !table.finished(state.workers[worker])) return false;
  }
  return true;
}

bool Transitions::rejoins(const State& state, std::uint16_t worker) const {
  return table.worker_state(state.workers[worker]).generation() !=
         table.switch_state(switch_of(state, worker)).generation();
}

bool Transitions::leaf_rejoins(const State& state, std::uint16_t leaf) const {
  return table.switch_state(state.leaves[leaf]).root_generation() != table.switch_state(state.machine).generation();
}

Id Transitions::switch_of(const State& state, std::uint16_t worker) const {
  return scope_.leaves.empty() ? state.machine : state.leaves[table.leaf_of(worker)];
}

bool Transitions::can_hear(const State& state, std::uint16_t worker) const {
  if (table.ended(state.workers[worker])) return false;
  for (std::uint16_t other = 0; other < scope_.workers; ++other) {
    const Id id = state.workers[other];
    const Generation generation = table.worker_state(id).root_generation;
    if (table.ended(id) && generation == table.worker_state(state.workers[worker]).root_generation) return true;
  }
  return false;
}

Id& Transitions::destination(State& state, const Packet& packet) const {
  if (packet.leaf) return packet.from_switch ? state.leaves[packet.worker] : state.machine;
  if (packet.from_switch) return state.workers[packet.worker];
  if (!scope_.leaves.empty()) return state.leaves[table.leaf_of(packet.worker)];
  const bool to_outlived =
      state.outlived != kNoId && packet.generation == table.switch_state(state.outlived).generation();
  return to_outlived ? state.outlived : state.machine;
}

const Step& Transitions::delivery(const State& state, Id packet) {
  const Packet& arriving = table.packet(packet);
  State at = state;
  const Id machine = destination(at, arriving);
  return arriving.from_switch && !arriving.leaf ? table.at_worker(machine, packet) : table.at_switch(machine, packet);
}

std::pair<State, Step> Transitions::apply(const State& state, const Transition& transition) {
  std::pair<State, Step> result{state, {}};
  auto& [next, step] = result;
  switch (transition.kind) {
    case Kind::deliver:
    case Kind::copy: {
      step = delivery(state, transition.what);
      destination(next, table.packet(transition.what)) = step.next;
      if (scope_.network == Network::exact && transition.kind == Kind::deliver) {
        next.network = table.network_without(next.network, transition.what);
      }
      break;
    }
    case Kind::lose:
      next.network = table.network_without(next.network, transition.what);
      step.became = "lost";
      return result;
    case Kind::timeout: {
      if (scope_.numbers > 0) {
        step = table.timeout(next.workers[transition.what]);
        next.workers[transition.what] = step.next;
        break;
      }
      const std::vector<Id>& resent = table.worker_state(next.workers[transition.what]).resent;
      step.sent.assign(resent.begin(), resent.begin() + transition.times);
      step.became = "sends again";
      break;
    }
    case Kind::call:
      step = table.call(next.workers[transition.what]);
      next.workers[transition.what] = step.next;
      break;
    case Kind::hear:
      step = table.hear(next.workers[transition.what]);
      next.workers[transition.what] = step.next;
      break;
    case Kind::rejoin: {
      const auto worker = static_cast<std::uint16_t>(transition.what);
      next.workers[worker] = table.new_worker(switch_of(next, worker), worker);
      step.became = "generation " + text_of(table.worker_state(next.workers[worker]).generation());
      break;
    }
    case Kind::rejoin_leaf:
      next.leaves[transition.what] = table.new_leaf(next.machine, static_cast<std::uint16_t>(transition.what));
      step.became = "generation " + text_of(table.switch_state(next.leaves[transition.what]).generation());
      break;
    case Kind::restart_group:
    case Kind::restart_switch:
    case Kind::restart_leaf: {
      const SwitchState& old = table.switch_state(next.machine);
      const auto following = [](Generation generation, bool restarts) {
        return restarts ? Generation{generation.incarnation + 1, Generation{}.epoch}
                        : Generation{generation.incarnation, generation.epoch + 1};
      };
      std::array<Generation, kMaxLeaves> leaves = old.leaves;
      for (std::uint32_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
        leaves[leaf] = following(leaves[leaf], transition.kind == Kind::restart_leaf && leaf == transition.what);
      }
      const Generation generation = following(old.generation(), transition.kind == Kind::restart_switch);
      if (scope_.outlives && transition.kind == Kind::restart_switch) next.outlived = next.machine;
      next.machine = table.new_switch(generation, old.restarts + 1, leaves);
      if (transition.kind == Kind::restart_leaf) {
        next.leaves[transition.what] = table.new_leaf(next.machine, static_cast<std::uint16_t>(transition.what));
      }
      step.became = "generation " + text_of(generation);
      break;
    }
  }
  if (step.broken.empty()) next.network = table.network_with(next.network, step.sent);
  return result;
}

void Transitions::each(const State& state, const Visit& visit) {
  bool go_on = true;
  const auto one = [&](const Transition& transition) {
    if (!go_on) return;
    ++tried_;
    const auto [next, step] = apply(state, transition);
    go_on = visit(transition, next, step.broken);
  };
  for (const Id packet : table.network(state.network)) {
    const Step& step = delivery(state, packet);
    State at = state;
    const Id before = destination(at, table.packet(packet));
    if (scope_.network == Network::exact) {
      one({Kind::deliver, packet});
      one({Kind::copy, packet});
      one({Kind::lose, packet});
    } else if (step.next != before || !step.sent.empty()) {
      one({Kind::deliver, packet});
    } else {
      ++tried_;  // as most packets of former generations: not worth a call of apply()
    }
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const Id id = state.workers[worker];
    if (table.can_call(id)) one({Kind::call, worker});
    if (can_hear(state, worker)) one({Kind::hear, worker});
    if (rejoins(state, worker)) one({Kind::rejoin, worker});
    if (scope_.numbers > 0 && table.can_time_out(id)) one({Kind::timeout, worker, 1});
    if (scope_.network == Network::exact) {
      for (std::uint32_t timeouts = 1; timeouts <= table.worker_state(id).resent.size(); ++timeouts) {
        one({Kind::timeout, worker, timeouts});
      }
    }
  }
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    if (leaf_rejoins(state, leaf)) one({Kind::rejoin_leaf, leaf});
  }
  if (table.switch_state(state.machine).restarts < scope_.restarts) {
    one({Kind::restart_group});
    one({Kind::restart_switch});
    for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) one({Kind::restart_leaf, leaf});
  }
}

void Transitions::each_without_network(const State& state, const Visit& visit) {
  bool go_on = true;
  // The transition, and the arrival of each packet that the machines send because of it, one after the other.
  const std::function<void(State&, const Transition&)> one = [&](State& at, const Transition& transition) {
    if (!go_on) return;
    auto [next, step] = apply(at, transition);
    next.network = state.network;
    at = next;
    go_on = visit(transition, next, step.broken);
    for (const Id sent : step.sent) one(at, {Kind::deliver, sent});
  };
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const Id id = state.workers[worker];
    State next = state;
    if (table.can_call(id)) one(next, {Kind::call, worker});
    next = state;
    if (can_hear(state, worker)) one(next, {Kind::hear, worker});
    next = state;
    if (rejoins(state, worker)) one(next, {Kind::rejoin, worker});
    for (const Id packet : table.worker_state(id).resent) {
      next = state;
      one(next, {Kind::deliver, packet});
    }
  }
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    State next = state;
    if (leaf_rejoins(state, leaf)) one(next, {Kind::rejoin_leaf, leaf});
  }
}

}  // namespace netfold::model_check
