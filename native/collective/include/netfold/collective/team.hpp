// The ranks that run an algorithm among themselves: positions 0..size-1, each a rank of the mesh.
//
// An algorithm speaks of positions only; what a peer is called in an error, and which connection leads to it, is its
// rank. So the same machine runs among everybody, or among one rank a host.
#pragma once

#include <netfold/transport/mesh.hpp>

#include <algorithm>
#include <numeric>
#include <vector>

namespace netfold::collective {

class Team {
 public:
  // `ranks` by position; `self` is one of them.
  Team(std::vector<int> ranks, int self)
      : ranks_(std::move(ranks)),
        position_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), self) - ranks_.begin())) {}

  static Team everyone(const transport::Mesh& mesh) {
    std::vector<int> ranks(static_cast<std::size_t>(mesh.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return {std::move(ranks), mesh.rank()};
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  int position() const { return position_; }
  int rank(int position) const { return ranks_[static_cast<std::size_t>(position)]; }
  // Round the team, in either direction.
  int wrapped(int position) const { return ((position % size()) + size()) % size(); }

 private:
  std::vector<int> ranks_;
  int position_;
};

}  // namespace netfold::collective
