// all_reduce of ranks on several hosts, some of which share memory: inside a host through memory, between hosts with as
// few bytes as one rank a host would send.
//
// Where every host has the same number of ranks L, each is a rail: reduce-scatter inside (rank p keeps part p), an
// all_reduce of part p among the p-th ranks of all hosts, all L of them at once, all-gather inside. Elsewhere, and
// where a switch adds between hosts, the first rank of a host speaks for it: reduce inside, all_reduce among the first
// ones, broadcast inside.
//
// Steps: those of the algorithm between hosts, and two through memory. Bytes a host sends for n bytes of tensor: what
// that algorithm sends for n among as many ranks as there are hosts. (Hierarchical collectives: Karonis et al., 2000.)
#pragma once

#include <netfold/collective/registry.hpp>

#include <optional>

namespace netfold::collective {

class Hierarchical final : public Algorithm {
 public:
  // Borrows the call and what the paths point to. `paths.nodes` names each rank's host.
  Hierarchical(const Call& call, const Paths& paths);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  enum class Stage : std::uint8_t { fold_inside, between, copy_inside, done };
  // A step of this call, over `buffers`: of its own kind, with nothing but its own algorithm's arithmetic.
  Call step(Kind kind, AlgorithmId algorithm) const;
  std::vector<Buffer> parts() const;
  void begin(Stage stage);
  bool has_rails() const { return rails_ > 1; }

  const Call& call_;
  const Paths paths_;
  std::vector<std::vector<int>> hosts_;  // ranks of each, ascending
  int position_ = 0;                     // of this rank on its host
  std::size_t inside_ = 1;               // ranks on this host
  std::size_t rails_ = 1;
  Stage stage_ = Stage::fold_inside;
  Call step_call_;
  std::unique_ptr<Algorithm> step_;  // null where the stage has nothing to do
};

}  // namespace netfold::collective
