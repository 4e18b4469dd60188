#include <netfold/collective/tree.hpp>

#include <tuple>

namespace netfold::collective {
namespace {

// A binary search tree over 1..ranks-1: a number's lowest set bit is its height. A missing parent is replaced by the
// next existing ancestor; 0 is above all.
int in_order_parent(int number, int ranks) {
  const int height = number & -number;
  const int above = (number ^ height) | (height << 1);
  return above < ranks ? above : number ^ height;
}

// The same tree on mirrored or shifted numbers, so that odd numbers, the leaves, become even ones.
int other_in_order_parent(int number, int ranks) {
  const bool mirrored = ranks % 2 == 1;
  const int image = mirrored ? ranks - number : number == 1 ? ranks - 1 : number - 1;
  const int above = in_order_parent(image, ranks);
  if (above == 0) return 0;
  return mirrored ? ranks - above : above == ranks - 1 ? 1 : above + 1;
}

int binomial_parent(int number, int) { return number & (number - 1); }

int chain_parent(int number, int) { return number - 1; }

}  // namespace

Tree::Tree(const Call& call, transport::Mesh& mesh, Team team_of)
    : PipelinedPlan(call, mesh, std::move(team_of)),
      root_(call.kind == Kind::all_reduce ? 0 : call.root),
      number_(team().wrapped(team().position() - root_)) {
  const Buffer& whole = call.outputs[0];
  std::vector<Shape> trees;
  if (call.algorithm == AlgorithmId::chain) {
    trees.push_back(shape(chain_parent, whole, pipeline_chunks_of(whole.bytes)));
  } else if (whole.bytes <= kBinomialBytes) {
    trees.push_back(shape(binomial_parent, whole, 1));
  } else {
    const Buffer half = part(whole, 2, 0, element_bytes());
    const std::size_t chunks = pipeline_chunks_of(half.bytes);
    trees.push_back(shape(in_order_parent, half, chunks));
    trees.push_back(shape(other_in_order_parent, part(whole, 2, 1, element_bytes()), chunks));
  }
  if (call.kind == Kind::reduce && number_ != 0) {
    std::size_t bytes = 0;
    for (Shape& tree : trees) {
      tree.slot_bytes = tree.children.empty() ? 0 : chunk(tree, 0).bytes;
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

Tree::Shape Tree::shape(int (*parent_of)(int number, int ranks), const Buffer& whole, std::size_t chunks) const {
  const int ranks = team().size();
  Shape tree;
  tree.parents.assign(static_cast<std::size_t>(ranks), -1);
  tree.depths.assign(static_cast<std::size_t>(ranks), 0);
  for (int number = 1; number < ranks; ++number) {
    const int parent = parent_of(number, ranks);
    tree.parents[static_cast<std::size_t>(number)] = parent;
    if (parent == number_) tree.children.push_back(number);
    for (int at = number; at != 0; at = parent_of(at, ranks)) ++tree.depths[static_cast<std::size_t>(number)];
  }
  tree.whole = whole;
  tree.chunks = chunks;
  tree.summed.resize(chunks);
  tree.sent.resize(chunks);
  return tree;
}

// Every rank orders its transfers by the same virtual time. So both ends of a connection agree on their order although
// two trees share it, and the earliest incomplete transfer never waits for a later one: there is no circular wait. Each
// chunk is one tick after the chunk before it, and each hop takes one tick.
void Tree::plan(std::vector<Shape>& trees) {
  std::size_t deepest = 0;
  for (const Shape& tree : trees) {
    for (const int depth : tree.depths) deepest = std::max(deepest, static_cast<std::size_t>(depth));
  }
  std::vector<Transfer> transfers;
  const bool goes_up = call().kind != Kind::broadcast;
  const bool goes_down = call().kind != Kind::reduce;
  for (std::size_t t = 0; t < trees.size(); ++t) {
    std::vector<int> edges = trees[t].children;  // by their lower ends
    if (number_ != 0) edges.push_back(number_);
    for (const int child : edges) {
      const auto depth = static_cast<std::size_t>(trees[t].depths[static_cast<std::size_t>(child)]);
      for (std::size_t chunk = 0; chunk < trees[t].chunks; ++chunk) {
        if (goes_up) transfers.push_back({chunk + deepest - depth, t, child, Direction::up, chunk});
        if (goes_down) transfers.push_back({chunk + deepest + depth, t, child, Direction::down, chunk});
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

void Tree::up(Shape& tree, const Transfer& transfer) {
  const Buffer own = chunk(tree, transfer.chunk);
  const bool uses_scratch = call().kind == Kind::reduce && number_ != 0 && !tree.children.empty();
  std::byte* sum = uses_scratch ? tree.slots + transfer.chunk % kSlots * tree.slot_bytes : own.data;
  Mark& summed = tree.summed[transfer.chunk];
  if (transfer.child == number_) {
    const int parent = tree.parents[static_cast<std::size_t>(number_)];
    tree.sent[transfer.chunk] = add(to(position(parent)), Send{sum, own.bytes, summed});
    return;
  }
  const bool first = transfer.child == tree.children.front();
  const std::byte* so_far = first ? own.data : sum;
  const Mark after = !first                                     ? summed
                     : uses_scratch && transfer.chunk >= kSlots ? tree.sent[transfer.chunk - kSlots]
                                                                : Mark{};
  summed = add(from(position(transfer.child)), Receive{sum, own.bytes, so_far, false, after});
}

void Tree::down(Shape& tree, const Transfer& transfer) {
  const Buffer own = chunk(tree, transfer.chunk);
  // At the root: all values are added. At other ranks the mark now means: the final chunk has arrived.
  Mark& finished = tree.summed[transfer.chunk];
  if (transfer.child == number_) {
    const int parent = tree.parents[static_cast<std::size_t>(number_)];
    finished = add(from(position(parent)), Receive{own.data, own.bytes, nullptr, false, {}});
  } else {
    add(to(position(transfer.child)), Send{own.data, own.bytes, finished, number_ == 0});
  }
}

}  // namespace netfold::collective
