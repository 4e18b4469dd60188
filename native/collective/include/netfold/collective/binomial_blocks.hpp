// Gather and scatter along a binomial tree: a rank passes on its whole subtree's blocks as one message.
//
// ceil(log2 P) steps. n(P-1)/P bytes go through the root's link, in log2 P messages instead of P-1, and up to half of
// that through the links of the root's children. A rank inside the tree allocates its subtree's blocks, the root all n.
//
// Blocks may differ in size, and only the root and a block's owner know the block's size. So the message before the
// blocks carries the sizes, eight bytes a block. A rank that passes blocks on reads their positions from the sizes; the
// root of a gather, and every rank of a scatter, compares them with the sizes that it expects.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>

#include <memory>

namespace netfold::collective {

class BinomialBlocks final : public Algorithm {
 public:
  // Borrows call and mesh for its lifetime. Kinds gather, scatter; P >= 2.
  BinomialBlocks(const Call& call, transport::Mesh& mesh, Team team);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  // A stage ends with its incoming messages; the last stage ends when the sockets have taken all outgoing messages.
  enum class Stage : std::uint8_t { sizes_in, sizes_out, blocks_in, blocks_out, done };

  // Ranks are numbered from the root: 0 is the root. A subtree is the numbers [number, number + span).
  int span(int number) const;
  int rank(int number) const { return team_.rank(position(number)); }
  int position(int number) const { return team_.wrapped(call_.root + number); }
  bool gathers() const { return call_.kind == Kind::gather; }
  void begin(Stage stage);
  // Sizes and blocks of the subtree of `number`, inside this rank's.
  Buffer sizes_of(int number);
  Buffer blocks_of(int number) const;
  bool compare_sizes();
  void take_own();
  void give_own();

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  int number_;
  std::vector<int> sources_;             // numbers of the children (gather) or the parent (scatter), ascending
  std::vector<int> targets_;             // of the parent (gather) or the children (scatter)
  std::vector<std::uint64_t> sizes_;     // of the subtree's blocks, by number minus number_
  std::unique_ptr<std::byte[]> blocks_;  // of the subtree, in the same order
  Stage stage_ = Stage::sizes_in;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;  // from sources_, in stages that receive
};

}  // namespace netfold::collective
