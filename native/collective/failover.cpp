#include <netfold/collective/failover.hpp>

#include <algorithm>
#include <cstdlib>

namespace netfold::collective {

Failover::Frozen Failover::freeze(std::uint64_t life) {
  if (current_.life == life) {
    current_.frozen = true;
    return {Which::current, true};
  }
  if (!stands(life)) return {};
  standing_.frozen = true;
  return {Which::standing, said_ == life};
}

Failover::Which Failover::fall_back(std::uint64_t life, std::uint64_t end, bool promised) {
  if (current_.life == life) {
    if (down_) return Which::none;
    down_ = true;
    for (Operation& operation : line_) {
      if (operation.way == Way::channel) operation.way = operation.first_chunk < end ? Way::host : Way::word;
      operation.first_chunk = 0;
    }
    return Which::current;
  }
  if (promised) gone_.push_back(life);
  if (!stands(life)) return Which::none;
  standing_ = {};
  return Which::standing;
}

bool Failover::promise(std::uint64_t life) {
  if (!stands(life) || standing_.frozen) return false;
  promised_ = life;
  return true;
}

std::uint64_t Failover::word() {
  if (!stands(promised_) || standing_.frozen) return 0;
  return said_ = promised_;
}

Failover::Way Failover::start(std::uint64_t number) {
  line_.push_back({.number = number, .way = is_up() ? Way::channel : Way::word});
  return line_.back().way;
}

void Failover::entered(std::uint64_t number, std::uint64_t first_chunk) { at(number).first_chunk = first_chunk; }

void Failover::finish(std::uint64_t number) {
  std::erase_if(line_, [&](const Operation& operation) { return operation.number == number; });
}

Failover::Way Failover::way(std::uint64_t number) const { return const_cast<Failover*>(this)->at(number).way; }

std::optional<std::uint64_t> Failover::turn() const {
  if (!down_) return std::nullopt;
  const auto waits = [](const Operation& operation) { return operation.way != Way::channel; };
  const auto first = std::ranges::find_if(line_, waits);
  if (first == line_.end()) return std::nullopt;
  return first->number;
}

Failover::Followed Failover::follow(std::uint64_t number, std::uint64_t word) {
  if (word == 0) {
    at(number).way = Way::host;
    return Followed::whole;
  }
  const auto gone = std::ranges::find(gone_, word);
  if (gone != gone_.end()) {
    gone_.erase(gone);
    return Followed::again;
  }
  if (!stands(word)) return Followed::unknown;
  current_ = standing_;
  standing_ = {};
  down_ = false;
  if (current_.frozen) return Followed::adopted;
  for (Operation& operation : line_) {
    if (operation.way == Way::word) operation.way = Way::channel;
  }
  return Followed::adopted;
}

Failover::Operation& Failover::at(std::uint64_t number) {
  const auto found = std::ranges::find(line_, number, &Operation::number);
  if (found == line_.end()) std::abort();  // the caller's mistake
  return *found;
}

void Failover::append_canonical(std::vector<std::byte>& out) const {
  const auto append = [&](std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) out.push_back(static_cast<std::byte>(value >> shift & 0xff));
  };
  for (const Membership& membership : {current_, standing_}) {
    append(membership.life);
    append(membership.frozen);
  }
  append(down_);
  append(promised_);
  append(said_);
  append(gone_.size());
  for (const std::uint64_t life : gone_) append(life);
  for (const Operation& operation : line_) {
    append(operation.number);
    append(static_cast<std::uint64_t>(operation.way));
    append(operation.first_chunk);
  }
}

}  // namespace netfold::collective
