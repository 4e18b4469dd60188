// A large all_reduce over two paths at once: a part of it through the switches, the rest round a ring, over the same
// links.
//
// A switch behind a link of c times a rank's link takes n P / (c b) seconds for n bytes of P ranks; a ring takes
// 2 n (P-1) / (P b). Together, each with the part that lets both end at once, they take less time than either alone.
// Shares gives the parts. Steps and bytes are those of the two parts.
//
// The ranks agree on the rates of each path after the first operations, and then after those that Shares selects, by an
// all_reduce of 2 (S + 1) + 1 integers for S switches over the mesh. Every rank gives the rates that it saw. The
// largest rate counts, since a rank that began late has waited least. Of the rest that a path did alone the smallest
// rate counts, since each rank sees the other path end at another moment. Shares learns from the agreed rates, so all
// ranks cut the next operation alike. Where a switch is lost, its part goes round the ring too, over connections of its
// own (switch_path.hpp), and nothing is learned.
#include <netfold/collective/sharded.hpp>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

// The rate of a rest that is too short to measure.
constexpr std::int64_t kUnmeasured = std::numeric_limits<std::int64_t>::min();
// Up to so many ranks a direct exchange is faster than a tree.
constexpr int kDirectRanks = 8;

// Moves parts of less than Sharded::kLeastPartBytes: a switch's to the host algorithm, the host algorithm's to the
// switch with the largest part.
std::vector<std::uint32_t> without_small_parts(std::vector<std::uint32_t> parts, std::size_t bytes) {
  const auto is_small = [&](std::uint32_t part) {
    return std::uint64_t{part} * bytes / Shares::kWhole < Sharded::kLeastPartBytes;
  };
  std::uint32_t& host = parts.back();
  for (std::size_t path = 0; path + 1 < parts.size(); ++path) {
    if (is_small(parts[path])) host += std::exchange(parts[path], 0);
  }
  const auto most = std::max_element(parts.begin(), parts.end() - 1);
  if (*most > 0 && is_small(host)) *most += std::exchange(host, 0);
  return parts;
}

class Split final : public Algorithm {
 public:
  // call: an all_reduce with elements. Precondition: paths.shares is set, for as many switches as there are paths.
  Split(const Call& call, const Paths& paths, Team team)
      : call_(call),
        paths_(paths),
        team_(std::move(team)),
        switches_(paths.switch_paths.size()),
        agrees_(paths.shares->learns_from(call.choice_bytes())) {
    Shares& shares = *paths.shares;
    const bool counts = call.choice_bytes() >= Shares::kLearnBytes;
    const auto parts = without_small_parts(counts ? shares.parts() : shares.balanced(), call.outputs[0].bytes);
    if (counts && !agrees_) shares.skip();
    host_done_ = parts.back() == 0;
    switches_done_ = parts.back() == Shares::kWhole;
    parts_ = std::make_unique<Sharded>(call, parts, [&](Call& part, std::size_t path) -> std::unique_ptr<Algorithm> {
      if (path < switches_) {
        part.algorithm = AlgorithmId::in_network;
        return std::make_unique<FailoverOperation>(part, *paths.switch_paths[path]);
      }
      part.algorithm = AlgorithmId::ring;
      return make_algorithm(part, paths, team_);
    });
  }

  ~Split() override { share_path(false); }
  Progress poll(std::int64_t now_ns) override {
    bool moved = false;
    if (agreement_ == nullptr) {
      const Progress progress = poll_parts(now_ns);
      if (progress != Progress::done) return progress;
      if (!agrees_) return Progress::done;
      start_agreement();
      moved = true;
    }
    const Progress progress = agreement_->poll(now_ns);
    if (progress == Progress::failed) return fail(agreement_->failure());
    counts_.wire_bytes = parts_->counts().wire_bytes + agreement_->counts().wire_bytes;
    if (progress == Progress::done) learn();
    return progress == Progress::idle && moved ? Progress::moved : progress;
  }

  void wait_for(WaitSet& set) const override {
    agreement_ != nullptr ? agreement_->wait_for(set) : parts_->wait_for(set);
  }
  std::vector<int> awaited() const override {
    return agreement_ != nullptr ? agreement_->awaited() : parts_->awaited();
  }
  bool awaited_may_wait() const override { return agreement_ != nullptr || parts_->awaited_may_wait(); }
  bool on_mesh() const override { return !host_done_ || agrees_; }
  void wait_for_mesh() override { parts_->hold(switches_, true); }
  void take_mesh() override { parts_->hold(switches_, false); }

 private:
  // A time below the whole time / kLeastTime is too short to measure a rate.
  static constexpr std::int64_t kLeastTime = 16;

  Progress poll_parts(std::int64_t now_ns) {
    const Progress progress = parts_->poll(now_ns);
    if (progress == Progress::failed) return fail(parts_->failure());
    counts_ = parts_->counts();
    note_ends();
    return progress;
  }

  void note_ends() {
    bool host_done = true;
    bool switches_done = true;
    for (const Sharded::Part& part : parts_->parts()) {
      if (!part.done) (part.path == switches_ ? host_done : switches_done) = false;
    }
    if (host_done != host_done_ || switches_done != switches_done_) parts_->mark();
    share_path(!host_done);
    host_done_ = host_done;
    switches_done_ = switches_done;
  }

  void share_path(bool with_own) {
    for (const auto& path : paths_.switch_paths) path->share_path(with_own);
  }

  void start_agreement() {
    rates_.assign(2 * (switches_ + 1) + 1, 0);
    std::int64_t host_ns = 0;
    std::int64_t switches_ns = 0;
    for (const Sharded::Part& part : parts_->parts()) {
      std::int64_t& end = part.path == switches_ ? host_ns : switches_ns;
      end = std::max(end, part.done_ns - parts_->began_ns());
      if (part.algorithm->substitute() != AlgorithmId::local) rates_.back() = 1;
    }
    const std::int64_t least_ns = std::max<std::int64_t>(1, std::max(host_ns, switches_ns) / kLeastTime);
    const auto rate = [&](double bytes, std::int64_t ns) {
      return ns < least_ns ? 0 : static_cast<std::int64_t>(bytes * 1e9 / static_cast<double>(ns));
    };
    for (const Sharded::Part& part : parts_->parts()) {
      const std::int64_t took_ns = part.done_ns - parts_->began_ns();
      const std::int64_t others_ns = part.path == switches_ ? switches_ns : host_ns;
      const auto bytes = static_cast<double>(part.call->outputs[0].bytes);
      const auto whole = static_cast<double>(std::max<std::uint64_t>(1, part.algorithm->settled_bytes()));
      // Bytes done when the other paths ended: all, or the settled bytes.
      const double before = took_ns <= others_ns ? bytes : bytes * static_cast<double>(part.settled_at_mark) / whole;
      rates_[2 * part.path] = rate(before, std::min(took_ns, others_ns));
      const std::int64_t alone = rate(bytes - before, took_ns - others_ns);
      rates_[2 * part.path + 1] = others_ns == 0 ? alone : alone == 0 ? kUnmeasured : -alone;
    }
    agreement_call_ = Call{
        .kind = Kind::all_reduce,
        .dtype = kernels::DType::i64,
        .reduce = kernels::ReduceOp::max,
        .wire = kernels::DType::i64,
        .algorithm = team_.size() <= kDirectRanks ? AlgorithmId::direct : AlgorithmId::tree,
        .table = call_.table,
        .sequence = call_.sequence,
        .step_of = call_.step(),
        .outputs = {{reinterpret_cast<std::byte*>(rates_.data()), rates_.size() * sizeof rates_[0]}},
    };
    agreement_ = make_algorithm(agreement_call_, {.mesh = paths_.mesh}, team_);
  }

  void learn() {
    if (rates_.back() != 0) return paths_.shares->skip();
    std::vector<Shares::Rates> path_rates;
    for (std::size_t path = 0; path <= switches_; ++path) {
      path_rates.push_back({.beside = static_cast<std::uint64_t>(rates_[2 * path]),
                            .alone = static_cast<std::uint64_t>(
                                rates_[2 * path + 1] == kUnmeasured ? 0 : std::abs(rates_[2 * path + 1]))});
    }
    paths_.shares->learn(path_rates);
  }

  const Call& call_;
  const Paths paths_;
  const Team team_;
  const std::size_t switches_;
  const bool agrees_;  // the ranks agree on the rates of this call; the next call begins after that
  std::unique_ptr<Sharded> parts_;
  bool host_done_ = false;      // has no part, or is done
  bool switches_done_ = false;  // the same of all switches
  // All ranks agree on these. For each path: its rate beside the other paths, and its rate alone, negative where it was
  // not alone from the start. Last: 1 where a switch was lost.
  std::vector<std::int64_t> rates_;
  Call agreement_call_;
  std::unique_ptr<Algorithm> agreement_;
};

}  // namespace

std::unique_ptr<Algorithm> make_split(const Call& call, const Paths& paths, Team team) {
  return std::make_unique<Split>(call, paths, std::move(team));
}

}  // namespace netfold::collective
