#include <netfold/collective/failover.hpp>
#include <netfold/protocol/canonical.hpp>

#include <algorithm>
#include <cstdlib>

namespace netfold::collective {

Failover::Frozen Failover::freeze(std::uint64_t generation) {
  if (current_.generation == generation) {
    current_.frozen = true;
    return {Which::current, true};
  }
  if (!stands(generation)) return {};
  standing_.frozen = true;
  return {Which::standing, announced_ == generation};
}

Failover::Which Failover::fall_back(std::uint64_t generation, std::uint64_t end, bool promised) {
  if (current_.generation == generation) {
    if (down_) return Which::none;
    down_ = true;
    for (Operation& operation : operations_) {
      if (operation.mode == Mode::channel) operation.mode = operation.first_chunk < end ? Mode::host : Mode::undecided;
      operation.first_chunk = 0;
    }
    return Which::current;
  }
  if (promised) lost_.push_back(generation);
  if (!stands(generation)) return Which::none;
  standing_ = {};
  return Which::standing;
}

bool Failover::promise(std::uint64_t generation) {
  if (!stands(generation) || standing_.frozen) return false;
  promised_ = generation;
  return true;
}

std::uint64_t Failover::announce() {
  if (!stands(promised_) || standing_.frozen) return 0;
  return announced_ = promised_;
}

Failover::Mode Failover::start(std::uint64_t number) {
  operations_.push_back({.number = number, .mode = is_up() ? Mode::channel : Mode::undecided});
  return operations_.back().mode;
}

void Failover::entered(std::uint64_t number, std::uint64_t first_chunk) { at(number).first_chunk = first_chunk; }

void Failover::finish(std::uint64_t number) {
  std::erase_if(operations_, [&](const Operation& operation) { return operation.number == number; });
}

Failover::Mode Failover::mode(std::uint64_t number) const { return const_cast<Failover*>(this)->at(number).mode; }

std::optional<std::uint64_t> Failover::host_operation() const {
  if (!down_) return std::nullopt;
  const auto leaves_channel = [](const Operation& operation) { return operation.mode != Mode::channel; };
  const auto first = std::ranges::find_if(operations_, leaves_channel);
  if (first == operations_.end()) return std::nullopt;
  return first->number;
}

Failover::Followed Failover::follow(std::uint64_t number, std::uint64_t announced) {
  if (announced == 0) {
    at(number).mode = Mode::host;
    return Followed::whole;
  }
  const auto lost = std::ranges::find(lost_, announced);
  if (lost != lost_.end()) {
    lost_.erase(lost);
    return Followed::again;
  }
  if (!stands(announced)) return Followed::unknown;
  current_ = standing_;
  standing_ = {};
  down_ = false;
  if (current_.frozen) return Followed::adopted;
  for (Operation& operation : operations_) {
    if (operation.mode == Mode::undecided) operation.mode = Mode::channel;
  }
  return Followed::adopted;
}

Failover::Operation& Failover::at(std::uint64_t number) {
  const auto found = std::ranges::find(operations_, number, &Operation::number);
  if (found == operations_.end()) std::abort();  // a programming error of the caller
  return *found;
}

void Failover::append_canonical(std::vector<std::byte>& out) const {
  using protocol::append_values;
  for (const Membership& membership : {current_, standing_})
    append_values(out, membership.generation, membership.frozen);
  append_values(out, down_, promised_, announced_, lost_.size());
  for (const std::uint64_t generation : lost_) append_values(out, generation);
  for (const Operation& operation : operations_) {
    append_values(out, operation.number, operation.mode, operation.first_chunk);
  }
}

}  // namespace netfold::collective
