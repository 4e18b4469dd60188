// Trees: reduce towards the root, broadcast away from it, or, as all_reduce, both through rank 0, pipelined.
//
// Large tensors take two binary trees at once, each with half of the tensor (Sanders, Speck & Traeff, 2009): whoever is
// inside one tree is a leaf of the other, so that all links are used in both directions and a rank sends
//   reduce, broadcast  n bytes at most (the broadcast's root and the reduce's leaves send n, others n or less)
//   all_reduce         2n bytes at most
// in about 2 log2 P steps (all_reduce: 4) of a chunk each, and a chunk's time a chunk. The trees stand on the ranks
// without the root, in order; the root is above both. Small tensors (up to kBinomialBytes) take one binomial tree in
// one chunk: log2 P steps (all_reduce: 2).
//
// Order of summation: own, then the children's in ascending order; a narrower wire format (all_reduce) is rounded on
// each way up and once by rank 0.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Tree final : public PipelinedPlan {
 public:
  static constexpr std::size_t kBinomialBytes = 16 << 10;

  // Borrows call and mesh for its life. Kinds all_reduce, reduce, broadcast; P >= 2. A rank inside a reduce's tree
  // allocates a few chunks of scratch.
  Tree(const Call& call, transport::Mesh& mesh, Team team);

 private:
  // Partial sums of a reduce wait in one of these until they have left.
  static constexpr std::size_t kSlots = 4;

  // Ranks are numbered from the root: 0 is the root.
  struct Shape {
    std::vector<int> parents;   // [0] is -1
    std::vector<int> depths;    // [0] is 0
    std::vector<int> children;  // of this rank, ascending
    Span what;                  // of the tensor
    std::size_t chunks = 1;
    std::vector<Mark> summed;  // a chunk each: own and all children's
    std::vector<Mark> left;    // a chunk each: it has gone up
    std::byte* slots = nullptr;
    std::size_t slot_bytes = 0;
  };
  enum class Direction : std::uint8_t { up, down };
  // A transfer of this rank with its parent or a child; `time` grows along everything that it waits for.
  struct Transfer {
    std::size_t time;
    std::size_t tree;
    int child;  // the lower end's number
    Direction direction;
    std::size_t chunk;
  };

  Shape shape(int (*parent_of)(int number, int ranks), Span what, std::size_t chunks) const;
  void plan(std::vector<Shape>& trees);
  void up(Shape& tree, const Transfer& transfer);
  void down(Shape& tree, const Transfer& transfer);
  int position(int number) const { return team().wrapped(root_ + number); }

  int root_;
  int number_;
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace netfold::collective
