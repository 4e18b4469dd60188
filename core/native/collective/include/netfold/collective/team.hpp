// The ranks that run an algorithm among themselves: positions 0..size-1, each a rank of the mesh.
//
// An algorithm uses positions only. Errors name a peer by its rank, and its rank selects the connection. So the same
// algorithm runs among all ranks or among one rank of each host. To make or copy a team costs the same for any size.
#pragma once

#include <netfold/transport/mesh.hpp>

#include <span>

namespace netfold::collective {

class Team {
 public:
  // `ranks`: by position; borrowed for the team's lifetime. `position`: this rank's.
  Team(std::span<const int> ranks, std::size_t position) : Team(ranks.data(), ranks.size(), position) {}
  // Position p is rank p.
  static Team everyone(const transport::Mesh& mesh) {
    return {nullptr, static_cast<std::size_t>(mesh.size()), static_cast<std::size_t>(mesh.rank())};
  }
  // The same team with another rank at one of the positions.
  Team with(std::size_t position, int rank) const {
    Team team = *this;
    team.replaced_ = static_cast<int>(position);
    team.replacement_ = rank;
    return team;
  }

  int size() const { return size_; }
  int position() const { return position_; }
  int rank(int position) const {
    if (position == replaced_) return replacement_;
    return ranks_ == nullptr ? position : ranks_[position];
  }
  // The position modulo the size; negative positions count from the end.
  int wrapped(int position) const { return ((position % size()) + size()) % size(); }

 private:
  Team(const int* ranks, std::size_t size, std::size_t position)
      : ranks_(ranks), size_(static_cast<int>(size)), position_(static_cast<int>(position)) {}

  const int* ranks_;  // null: of everyone
  int size_;
  int position_;
  int replaced_ = -1;
  int replacement_ = -1;
};

}  // namespace netfold::collective
