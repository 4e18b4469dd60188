#include "moves.hpp"

namespace netfold::model_check {

using Kind = Move::Kind;

State Moves::first() {
  State state{.machine = parts.new_switch(Life{}, 0), .network = parts.network_of({})};
  state.network = parts.with(state.network, parts.strangers());
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    state.leaves[leaf] = parts.new_leaf(state.machine, leaf);
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    state.workers[worker] = parts.new_worker(machine_of(state, worker), worker);
  }
  return state;
}

bool Moves::finished(const State& state) const {
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    if (leaf_rejoins(state, leaf)) return false;
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    if (rejoins(state, worker) || !parts.finished(state.workers[worker])) return false;
  }
  return true;
}

bool Moves::rejoins(const State& state, std::uint16_t worker) const {
  return parts.worker_state(state.workers[worker]).life() != parts.switch_state(machine_of(state, worker)).life();
}

bool Moves::leaf_rejoins(const State& state, std::uint16_t leaf) const {
  return parts.switch_state(state.leaves[leaf]).root_life() != parts.switch_state(state.machine).life();
}

Id Moves::machine_of(const State& state, std::uint16_t worker) const {
  return scope_.leaves.empty() ? state.machine : state.leaves[parts.leaf_of(worker)];
}

bool Moves::can_hear(const State& state, std::uint16_t worker) const {
  if (parts.ended(state.workers[worker])) return false;
  for (std::uint16_t other = 0; other < scope_.workers; ++other) {
    const Id id = state.workers[other];
    const Life life = parts.worker_state(id).root_life;
    if (parts.ended(id) && life == parts.worker_state(state.workers[worker]).root_life) return true;
  }
  return false;
}

Id& Moves::place_of(State& state, const Packet& packet) const {
  if (packet.leaf) return packet.from_switch ? state.leaves[packet.worker] : state.machine;
  if (packet.from_switch) return state.workers[packet.worker];
  return scope_.leaves.empty() ? state.machine : state.leaves[parts.leaf_of(packet.worker)];
}

const Step& Moves::delivered(const State& state, Id packet) {
  const Packet& arriving = parts.packet(packet);
  State at = state;
  const Id machine = place_of(at, arriving);
  return arriving.from_switch && !arriving.leaf ? parts.at_worker(machine, packet) : parts.at_switch(machine, packet);
}

std::pair<State, Step> Moves::done(const State& state, const Move& move) {
  std::pair<State, Step> made{state, {}};
  auto& [next, step] = made;
  switch (move.kind) {
    case Kind::deliver:
    case Kind::copy: {
      step = delivered(state, move.what);
      place_of(next, parts.packet(move.what)) = step.next;
      if (scope_.network == Network::taken && move.kind == Kind::deliver) {
        next.network = parts.without(next.network, move.what);
      }
      break;
    }
    case Kind::lose:
      next.network = parts.without(next.network, move.what);
      step.became = "lost";
      return made;
    case Kind::ring: {
      if (scope_.numbers > 0) {
        step = parts.ring(next.workers[move.what]);
        next.workers[move.what] = step.next;
        break;
      }
      const std::vector<Id>& again = parts.worker_state(next.workers[move.what]).again;
      step.sent.assign(again.begin(), again.begin() + move.times);
      step.became = "sends again";
      break;
    }
    case Kind::call:
      step = parts.call(next.workers[move.what]);
      next.workers[move.what] = step.next;
      break;
    case Kind::hear:
      step = parts.hear(next.workers[move.what]);
      next.workers[move.what] = step.next;
      break;
    case Kind::rejoin: {
      const auto worker = static_cast<std::uint16_t>(move.what);
      next.workers[worker] = parts.new_worker(machine_of(next, worker), worker);
      step.became = "life " + words(parts.worker_state(next.workers[worker]).life());
      break;
    }
    case Kind::rejoin_leaf:
      next.leaves[move.what] = parts.new_leaf(next.machine, static_cast<std::uint16_t>(move.what));
      step.became = "life " + words(parts.switch_state(next.leaves[move.what]).life());
      break;
    case Kind::restart_group:
    case Kind::restart_switch:
    case Kind::restart_leaf: {
      const SwitchState& old = parts.switch_state(next.machine);
      const auto following = [](Life life, bool restarts) {
        return restarts ? Life{life.incarnation + 1, Life{}.epoch} : Life{life.incarnation, life.epoch + 1};
      };
      std::array<Life, kMaxLeaves> leaves = old.leaves;
      for (std::uint32_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
        leaves[leaf] = following(leaves[leaf], move.kind == Kind::restart_leaf && leaf == move.what);
      }
      const Life life = following(old.life(), move.kind == Kind::restart_switch);
      next.machine = parts.new_switch(life, old.restarts + 1, leaves);
      if (move.kind == Kind::restart_leaf) {
        next.leaves[move.what] = parts.new_leaf(next.machine, static_cast<std::uint16_t>(move.what));
      }
      step.became = "life " + words(life);
      break;
    }
  }
  if (step.broken.empty()) next.network = parts.with(next.network, step.sent);
  return made;
}

void Moves::each(const State& state, const Visit& visit) {
  bool go_on = true;
  const auto one = [&](const Move& move) {
    if (!go_on) return;
    ++tried_;
    const auto [next, step] = done(state, move);
    go_on = visit(move, next, step.broken);
  };
  for (const Id packet : parts.network(state.network)) {
    const Step& step = delivered(state, packet);
    State at = state;
    const Id before = place_of(at, parts.packet(packet));
    if (scope_.network == Network::taken) {
      one({Kind::deliver, packet});
      one({Kind::copy, packet});
      one({Kind::lose, packet});
    } else if (step.next != before || !step.sent.empty()) {
      one({Kind::deliver, packet});
    } else {
      ++tried_;  // most packets of former lives: worth a short way
    }
  }
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const Id id = state.workers[worker];
    if (parts.can_call(id)) one({Kind::call, worker});
    if (can_hear(state, worker)) one({Kind::hear, worker});
    if (rejoins(state, worker)) one({Kind::rejoin, worker});
    if (scope_.numbers > 0 && parts.can_ring(id)) one({Kind::ring, worker, 1});
    if (scope_.network == Network::taken) {
      for (std::uint32_t rings = 1; rings <= parts.worker_state(id).again.size(); ++rings) {
        one({Kind::ring, worker, rings});
      }
    }
  }
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
    if (leaf_rejoins(state, leaf)) one({Kind::rejoin_leaf, leaf});
  }
  if (parts.switch_state(state.machine).restarts < scope_.restarts) {
    one({Kind::restart_group});
    one({Kind::restart_switch});
    for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) one({Kind::restart_leaf, leaf});
  }
}

void Moves::each_alone(const State& state, const Visit& visit) {
  bool go_on = true;
  // The move, and the arrival of all that it makes the machines send, one after the other.
  const std::function<void(State&, const Move&)> one = [&](State& at, const Move& move) {
    if (!go_on) return;
    auto [next, step] = done(at, move);
    next.network = state.network;
    at = next;
    go_on = visit(move, next, step.broken);
    for (const Id sent : step.sent) one(at, {Kind::deliver, sent});
  };
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const Id id = state.workers[worker];
    State next = state;
    if (parts.can_call(id)) one(next, {Kind::call, worker});
    next = state;
    if (can_hear(state, worker)) one(next, {Kind::hear, worker});
    next = state;
    if (rejoins(state, worker)) one(next, {Kind::rejoin, worker});
    for (const Id packet : parts.worker_state(id).again) {
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
