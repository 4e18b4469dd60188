#include <algorithm>
#include <optional>
#include <stdexcept>

#include "transitions.hpp"

namespace netfold::model_check {
namespace {

using Kind = Transition::Kind;

// How a kind of transition stands in a trace.
struct Wording {
  enum class Of : std::uint8_t { packet, worker, leaf, all };
  const char* step;  // before the packet, the worker or the leaf
  Of of;
  const char* what;  // of a packet: its name
};
constexpr Wording kWordings[] = {
    // by kind
    {"", Wording::Of::packet, ""},
    {"copy ", Wording::Of::packet, ""},
    {"lose ", Wording::Of::packet, ""},
    {"timeout ", Wording::Of::worker, "timeout"},
    {"call ", Wording::Of::worker, "next operation"},
    {"hear ", Wording::Of::worker, "another has ended"},
    {"rejoin ", Wording::Of::worker, "rejoins"},
    {"rejoin leaf ", Wording::Of::leaf, "rejoins"},
    {"restart group", Wording::Of::all, "the group restarts"},
    {"restart switch", Wording::Of::all, "the switch restarts"},
    {"restart leaf ", Wording::Of::leaf, "the leaf restarts"},
};
const Wording& wording_of(const Transition& transition) { return kWordings[static_cast<std::size_t>(transition.kind)]; }

std::string name_of(const Packet& packet) {
  return (packet.foreign ? "x" : "") + text_of(packet.generation) + "/" + (packet.leaf ? "^" : "") +
         std::to_string(packet.worker) +
         (packet.nack          ? "!"
          : packet.from_switch ? "<"
                               : ">") +
         std::to_string(packet.chunk);
}

// One run, event by event, with its packets in the order of sending.
class Run {
 public:
  explicit Run(Transitions& transitions) : transitions_(transitions), state_(transitions.first()) {}

  Step apply(const Transition& transition) {
    auto [next, step] = transitions_.apply(state_, transition);
    if (step.broken.empty()) state_ = next;
    for (const Id packet : step.sent) {
      if (std::ranges::find(sent_, packet) == sent_.end()) sent_.push_back(packet);
    }
    return step;
  }

  std::string text_of(const Transition& transition) const {
    const auto& [step, of, what] = wording_of(transition);
    std::string text = step;
    if (of == Wording::Of::packet) {
      text += text_of_packet(transition.what);
    } else if (of != Wording::Of::all) {
      text += std::to_string(transition.what);
    }
    return transition.times > 1 ? text + " " + std::to_string(transition.times) : text;
  }

  // Returns the transition of that step, if it is possible now.
  std::optional<Transition> parse(const std::string& step) {
    for (const Id packet : transitions_.table.network(state_.network)) {
      // `each` skips deliveries without effect.
      if (text_of({Kind::deliver, packet}) == step) return Transition{Kind::deliver, packet};
    }
    std::optional<Transition> found;
    transitions_.each(state_, [&](const Transition& transition, const State&, const std::string&) {
      if (text_of(transition) == step) found = transition;
      return !found;
    });
    return found;
  }

  // Describes the machine that the transition happened to.
  std::string state_after(const Transition& transition) const {
    const auto of = wording_of(transition).of;
    if (of == Wording::Of::worker) return describe_worker(static_cast<std::uint16_t>(transition.what));
    if (of != Wording::Of::packet || transition.kind == Kind::lose) return {};
    return describe_destination(transitions_.table.packet(transition.what));
  }

 private:
  std::string text_of_packet(Id packet) const {
    const std::string name = name_of(transitions_.table.packet(packet));
    int nth = 0;
    for (const Id other : sent_) {
      nth += name_of(transitions_.table.packet(other)) == name;
      if (other == packet) break;
    }
    return nth <= 1 ? name : name + "=" + std::to_string(nth);
  }

  std::string describe_worker(std::uint16_t index) const {
    const WorkerState& state = transitions_.table.worker_state(state_.workers[index]);
    const std::string generation = "generation " + model_check::text_of(state.generation());
    if (state.ended) return generation;
    std::string has, waits;
    for (std::uint64_t chunk = 0; chunk < kMaxChunks; ++chunk) {
      if (state.received >> chunk & 1) {
        has += " " + std::to_string(chunk);
      } else if (state.sent >> chunk & 1) {
        waits += " " + std::to_string(chunk);
      }
    }
    return generation + ", has" + (has.empty() ? " nothing" : has) + ", waits for" +
           (waits.empty() ? " nothing" : waits);
  }

  std::string describe_destination(const Packet& packet) const {
    if (packet.leaf && packet.from_switch) return {};  // the slot has no missing contribution any more
    if (packet.from_switch) return describe_worker(packet.worker);
    State at = state_;
    return describe_slot(transitions_.destination(at, packet), packet.chunk);
  }

  std::string describe_slot(Id machine, std::uint64_t chunk) const {
    std::string missing;
    const auto workers = std::visit([chunk](const auto& each) { return each.missing(chunk); },
                                    transitions_.table.switch_state(machine).machine);
    for (const std::uint16_t index : workers) missing += " " + std::to_string(index);
    return missing.empty() ? "" : "chunk " + std::to_string(chunk) + " misses" + missing;
  }

  Transitions& transitions_;
  State state_;
  std::vector<Id> sent_;
};

}  // namespace

std::vector<std::string> trace_steps(Transitions& transitions, const std::vector<Transition>& path) {
  Run run(transitions);
  std::vector<std::string> steps;
  for (const Transition& transition : path) {
    steps.push_back(run.text_of(transition));
    run.apply(transition);
  }
  return steps;
}

std::vector<Record> replay(const Scope& scope, const std::vector<std::string>& steps) {
  Transitions transitions(scope);
  Run run(transitions);
  std::vector<Record> records;
  for (const std::string& text : steps) {
    const auto transition = run.parse(text);
    if (!transition) {
      throw std::invalid_argument("step " + std::to_string(records.size() + 1) + ", " + text + ", cannot happen then");
    }
    Record record{.step = text};
    const Step step = run.apply(*transition);
    record.became = step.became;
    record.broken = step.broken;
    record.state = run.state_after(*transition);
    const auto& [words, of, what] = wording_of(*transition);
    if (of == Wording::Of::packet) {
      const Packet& packet = transitions.table.packet(transition->what);
      const std::string below = (packet.leaf ? "leaf " : "worker ") + std::to_string(packet.worker);
      const std::string above = packet.leaf || scope.leaves.empty()
                                    ? "switch"
                                    : "leaf " + std::to_string(transitions.table.leaf_of(packet.worker));
      record.source = packet.from_switch ? above : below;
      record.to = packet.from_switch ? below : above;
      record.what = (packet.nack          ? "NACK from "
                     : packet.from_switch ? "result "
                     : packet.leaf        ? "sum "
                                          : "chunk ") +
                    std::to_string(packet.chunk) + " of " +
                    (packet.foreign ? "another job" : text_of(packet.generation));
    } else {
      const std::string number = std::to_string(transition->what);
      record.to = of == Wording::Of::worker ? "worker " + number
                  : of == Wording::Of::leaf ? "leaf " + number
                                            : "switch";
      record.what = what;
    }
    records.push_back(std::move(record));
    if (!step.broken.empty()) break;
  }
  return records;
}

}  // namespace netfold::model_check
