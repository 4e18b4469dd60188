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
#include <netfold/collective/pipelined_plan.hpp>

#include <algorithm>
#include <bit>
#include <iterator>
#include <tuple>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

// The place of one number in a tree over 0..ranks-1, of which 0 is the root. A call finds it in O(log P) steps, and does
// not build the whole tree.
struct Place {
  int depth = 0;
  int parent = -1;            // of the root: -1
  std::vector<int> children;  // ascending
};
using PlaceOf = Place(int number, int ranks);

// A missing parent is replaced by the next existing ancestor; 0 is above all.
int in_order_parent(int number, int ranks) {
  const int height = number & -number;
  const int above = (number ^ height) | (height << 1);
  return above < ranks ? above : number ^ height;
}

// A binary search tree over 1..ranks-1: a number's lowest set bit is its height.
Place in_order(int number, int ranks) {
  if (number == 0) return {.children = {static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks - 1)))}};
  Place place{.parent = in_order_parent(number, ranks)};
  for (int at = number; at != 0; at = in_order_parent(at, ranks)) ++place.depth;
  const int half = (number & -number) / 2;
  if (half > 0) place.children.push_back(number - half);
  // The first that exists is the root of the subtree behind the number.
  for (int step = half; step > 0; step /= 2) {
    if (number + step >= ranks) continue;
    place.children.push_back(number + step);
    break;
  }
  return place;
}

// The same tree on mirrored or shifted numbers, so that odd numbers, the leaves, become even ones.
Place other_in_order(int number, int ranks) {
  const bool mirrored = ranks % 2 == 1;
  const auto image = [=](int of) { return mirrored ? ranks - of : of == 1 ? ranks - 1 : of - 1; };
  const auto original = [=](int of) { return mirrored ? ranks - of : of == ranks - 1 ? 1 : of + 1; };
  Place place = in_order(number == 0 ? 0 : image(number), ranks);
  if (place.parent > 0) place.parent = original(place.parent);
  for (int& child : place.children) child = original(child);
  std::ranges::sort(place.children);
  return place;
}

Place binomial(int number, int ranks) {
  Place place{.depth = std::popcount(static_cast<unsigned>(number))};
  if (number > 0) place.parent = number & (number - 1);
  const int end = number > 0 ? number & -number : ranks;
  for (int step = 1; step < end && number + step < ranks; step *= 2) place.children.push_back(number + step);
  return place;
}

Place chain(int number, int ranks) {
  Place place{.depth = number, .parent = number - 1};
  if (number + 1 < ranks) place.children.push_back(number + 1);
  return place;
}

class Tree final : public PipelinedPlan {
 public:
  static constexpr std::size_t kBinomialBytes = 16 << 10;

  // Kinds all_reduce, reduce, broadcast; a chain: broadcast only. P >= 2. A
  // rank inside a reduce's tree allocates a few chunks of scratch.
  Tree(const Call& call, transport::Mesh& mesh, Team team_of)
      : PipelinedPlan(call, mesh, std::move(team_of)),
        root_(call.kind == Kind::all_reduce ? 0 : call.root),
        number_(team().wrapped(team().position() - root_)) {
    const Buffer& whole = call.outputs[0];
    std::vector<Shape> trees;
    if (call.algorithm == AlgorithmId::chain) {
      trees.push_back(shape(chain, whole, pipeline_chunks_of(whole.bytes)));
    } else if (whole.bytes <= kBinomialBytes) {
      trees.push_back(shape(binomial, whole, 1));
    } else {
      const Buffer half = part(whole, 2, 0, element_bytes());
      const std::size_t chunks = pipeline_chunks_of(half.bytes);
      trees.push_back(shape(in_order, half, chunks));
      trees.push_back(shape(other_in_order, part(whole, 2, 1, element_bytes()), chunks));
    }
    if (call.kind == Kind::reduce && number_ != 0) {
      std::size_t bytes = 0;
      for (Shape& tree : trees) {
        tree.slot_bytes = tree.place.children.empty() ? 0 : chunk(tree, 0).bytes;
        bytes += kSlots * tree.slot_bytes;
      }
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      std::byte* next = scratch_.get();
      for (Shape& tree : trees) {
        tree.slots = next;
        next += kSlots * tree.slot_bytes;
      }
    }
    plan(trees);
    finish_plan();
  }

 private:
  // Slots for the partial sums of a reduce that are not sent yet.
  static constexpr std::size_t kSlots = 4;

  // Ranks are numbered from the root: 0 is the root.
  struct Shape {
    Place place;              // of this rank
    std::vector<int> leaves;  // the children that have none
    Buffer whole;             // its part of the tensor
    std::size_t chunks = 1;
    std::vector<Mark> summed;  // by chunk: own and all children's values are added
    std::vector<Mark> sent;    // by chunk: the sum is sent to the parent
    std::byte* slots = nullptr;
    std::size_t slot_bytes = 0;
    bool is_leaf(int child) const { return std::ranges::find(leaves, child) != leaves.end(); }
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

  Shape shape(PlaceOf place_of, const Buffer& whole, std::size_t chunks) const {
    Shape tree{.place = place_of(number_, team().size()), .leaves = {}, .whole = whole, .chunks = chunks};
    if (call().average != Averaging::none) {
      std::ranges::copy_if(tree.place.children, std::back_inserter(tree.leaves),
                           [&](int child) { return place_of(child, team().size()).children.empty(); });
    }
    tree.summed.resize(chunks);
    tree.sent.resize(chunks);
    return tree;
  }

  Buffer chunk(const Shape& tree, std::size_t number) const {
    return part(tree.whole, tree.chunks, number, element_bytes());
  }
  // Every rank orders its transfers by the same virtual time. So both ends of a connection agree on their order
  // although two trees share it, and the earliest incomplete transfer never waits for a later one: there is no circular
  // wait. Each chunk is one tick after the chunk before it, and each hop takes one tick.
  void plan(std::vector<Shape>& trees) {
    const auto above_all = static_cast<std::size_t>(team().size());  // more than any depth
    std::vector<Transfer> transfers;
    const bool goes_up = call().kind != Kind::broadcast;
    const bool goes_down = call().kind != Kind::reduce;
    for (std::size_t t = 0; t < trees.size(); ++t) {
      const Place& place = trees[t].place;
      std::vector<int> edges = place.children;  // by their lower ends
      if (number_ != 0) edges.push_back(number_);
      for (const int child : edges) {
        const auto depth = static_cast<std::size_t>(place.depth + (child == number_ ? 0 : 1));
        for (std::size_t chunk = 0; chunk < trees[t].chunks; ++chunk) {
          if (goes_up) transfers.push_back({chunk + above_all - depth, t, child, Direction::up, chunk});
          if (goes_down) transfers.push_back({chunk + above_all + depth, t, child, Direction::down, chunk});
        }
      }
    }
    std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
      return std::tie(a.time, a.tree, a.direction, a.child) < std::tie(b.time, b.tree, b.direction, b.child);
    });
    for (const Transfer& transfer : transfers) {
      Shape& tree = trees[transfer.tree];
      transfer.direction == Direction::up ? up(tree, transfer) : down(tree, transfer);
    }
  }

  void up(Shape& tree, const Transfer& transfer) {
    const Buffer own = chunk(tree, transfer.chunk);
    const bool uses_scratch = call().kind == Kind::reduce && number_ != 0 && !tree.place.children.empty();
    std::byte* sum = uses_scratch ? tree.slots + transfer.chunk % kSlots * tree.slot_bytes : own.data;
    Mark& summed = tree.summed[transfer.chunk];
    if (transfer.child == number_) {
      tree.sent[transfer.chunk] = add(to(position(tree.place.parent)), Send{sum, own.bytes, summed});
      return;
    }
    const bool first = transfer.child == tree.place.children.front();
    const std::byte* so_far = first ? own.data : sum;
    const Mark after = !first                                     ? summed
                       : uses_scratch && transfer.chunk >= kSlots ? tree.sent[transfer.chunk - kSlots]
                                                                  : Mark{};
    summed = add(from(position(transfer.child)),
                 Receive{.into = sum,
                         .bytes = own.bytes,
                         .operand = so_far,
                         .after = after,
                         .arrived_of = tree.is_leaf(transfer.child) ? wrapped(transfer.child) : Reduction::kSum,
                         .operand_of = first ? team().position() : Reduction::kSum,
                         .finishes = number_ == 0 && transfer.child == tree.place.children.back()});
  }

  void down(Shape& tree, const Transfer& transfer) {
    const Buffer own = chunk(tree, transfer.chunk);
    // At the root: all values are added. At other ranks the mark now means: the final chunk has arrived.
    Mark& finished = tree.summed[transfer.chunk];
    if (transfer.child == number_) {
      finished = add(from(position(tree.place.parent)), Receive{.into = own.data, .bytes = own.bytes});
    } else {
      add(to(position(transfer.child)), Send{own.data, own.bytes, finished, number_ == 0});
    }
  }

  int position(int number) const { return root_ + number; }  // to and from wrap it
  int wrapped(int number) const { return team().wrapped(position(number)); }

  int root_;
  int number_;
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace

std::unique_ptr<Algorithm> make_tree(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<Tree>(call, paths.mesh, std::move(team));
}

}  // namespace netfold::collective
