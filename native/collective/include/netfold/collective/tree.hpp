// Trees: reduce towards the root, broadcast away from it, or, as all_reduce, both through rank 0, pipelined.
//
// Large tensors take two binary trees at once, each with half of the tensor (Sanders, Speck & Traeff, 2009). A rank
// inside one tree is a leaf of the other, so that all links are used in both directions. A rank sends
//
//   reduce, broadcast  n bytes at most (the broadcast's root and the reduce's leaves send n, the other ranks n or less)
//   all_reduce         2n bytes at most
//
// in about 2 log2 P steps (all_reduce: 4) of a chunk each, then one chunk in each chunk's time. The trees consist of
// the ranks without the root, in order; the root is above both. Small tensors (up to kBinomialBytes) take one binomial
// tree in one chunk: log2 P steps (all_reduce: 2).
//
// A chain is the tree in which each rank has one child, for a broadcast of large tensors among few ranks. The first
// chunk takes P-1 hops; then one chunk arrives in each chunk's time (pipeline_chunks_of). Every rank but the last sends
// n bytes. No broadcast takes less time for large n and few ranks.
//
// Order of summation: own, then the children's in ascending order. A narrower wire format (all_reduce) is rounded at
// every hop upwards and once by rank 0.
#pragma once

#include <netfold/collective/pipelined_plan.hpp>

#include <memory>

namespace netfold::collective {

class Tree final : public PipelinedPlan {
 public:
  static constexpr std::size_t kBinomialBytes = 16 << 10;

  // Borrows call and mesh for its lifetime. Kinds all_reduce, reduce, broadcast; a chain: broadcast only. P >= 2. A
  // rank inside a reduce's tree allocates a few chunks of scratch.
  Tree(const Call& call, transport::Mesh& mesh, Team team);

 private:
  // Slots for the partial sums of a reduce that are not sent yet.
  static constexpr std::size_t kSlots = 4;

  // Ranks are numbered from the root: 0 is the root.
  struct Shape {
    std::vector<int> parents;   // [0] is -1
    std::vector<int> depths;    // [0] is 0
    std::vector<int> children;  // of this rank, ascending
    Buffer whole;               // its part of the tensor
    std::size_t chunks = 1;
    std::vector<Mark> summed;  // by chunk: own and all children's values are added
    std::vector<Mark> sent;    // by chunk: the sum is sent to the parent
    std::byte* slots = nullptr;
    std::size_t slot_bytes = 0;
  };
  enum class Direction : std::uint8_t { up, down };
  // A transfer of this rank with its parent or a child. `time` is larger than that of every transfer it waits for.
  struct Transfer {
    std::size_t time;
    std::size_t tree;
    int child;  // the number of the lower end
    Direction direction;
    std::size_t chunk;
  };

  Shape shape(int (*parent_of)(int number, int ranks), const Buffer& whole, std::size_t chunks) const;
  Buffer chunk(const Shape& tree, std::size_t number) const {
    return part(tree.whole, tree.chunks, number, element_bytes());
  }
  void plan(std::vector<Shape>& trees);
  void up(Shape& tree, const Transfer& transfer);
  void down(Shape& tree, const Transfer& transfer);
  int position(int number) const { return root_ + number; }  // to and from wrap it

  int root_;
  int number_;
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace netfold::collective
