// A set of states in the order in which they were found: 36 bytes a state, and a half-full table of 4-byte numbers.
#pragma once

#include "transitions.hpp"

#include <utility>
#include <vector>

namespace netfold::model_check {

class StateSet {
 public:
  StateSet() : table_(1024, kNoId) {}

  // Returns the state's number, and whether it is new.
  std::pair<Id, bool> add(const State& state) {
    if (2 * states_.size() >= table_.size()) grow();
    Id& at = table_[slot_of(state)];
    if (at != kNoId) return {at, false};
    at = static_cast<Id>(states_.size());
    states_.push_back(state);
    return {at, true};
  }
  // Returns kNoId for a state that is not in the set.
  Id find(const State& state) const { return table_[slot_of(state)]; }

  const State& operator[](Id id) const { return states_[id]; }
  std::size_t size() const { return states_.size(); }

 private:
  std::size_t slot_of(const State& state) const {
    std::size_t slot = hash(state) & (table_.size() - 1);
    while (table_[slot] != kNoId && !(states_[table_[slot]] == state)) slot = (slot + 1) & (table_.size() - 1);
    return slot;
  }
  static std::uint64_t hash(const State& state) {
    // Ids are small and close together: multiplying moves the differences to the high bits; shift them back.
    std::uint64_t hash = 0;
    const auto mix = [&hash](std::uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    };
    mix(std::uint64_t{state.machine} << 32 | state.network);
    for (std::size_t i = 0; i < kMaxWorkers; i += 2) mix(std::uint64_t{state.workers[i]} << 32 | state.workers[i + 1]);
    mix(std::uint64_t{state.leaves[0]} << 32 | state.leaves[1]);
    mix(state.outlived);
    return hash;
  }
  void grow() {
    table_.assign(2 * table_.size(), kNoId);
    for (std::size_t id = 0; id < states_.size(); ++id) table_[slot_of(states_[id])] = static_cast<Id>(id);
  }

  std::vector<State> states_;
  std::vector<Id> table_;
};

}  // namespace netfold::model_check
