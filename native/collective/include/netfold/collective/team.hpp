// The ranks that run an algorithm among themselves: positions 0..size-1, each a rank of the mesh.
//
// An algorithm uses positions only. Errors name a peer by its rank, and its rank selects the connection. So the same
// algorithm runs among all ranks or among one rank of each host.
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
  // The position modulo the size; negative positions count from the end.
  int wrapped(int position) const { return ((position % size()) + size()) % size(); }

 private:
  std::vector<int> ranks_;
  int position_;
};

}  // namespace netfold::collective
