#include <netfold/collective/split.hpp>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

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

}  // namespace

Split::Split(const Call& call, const Paths& paths, Team team)
    : call_(call),
      paths_(paths),
      team_(std::move(team)),
      switches_(paths.switch_paths.size()),
      agrees_(updates_shares(call, *paths.shares)) {
  Shares& shares = *paths.shares;
  const bool counts = call.choice_bytes() >= kLearnBytes;
  const auto parts = without_small_parts(counts ? shares.parts() : shares.balanced(), call.outputs[0].bytes);
  if (counts && !agrees_) shares.skip();
  host_done_ = parts.back() == 0;
  switches_done_ = parts.back() == Shares::kWhole;
  parts_ = std::make_unique<Sharded>(call, parts, [&](Call& part, std::size_t path) -> std::unique_ptr<Algorithm> {
    if (path < switches_) {
      part.algorithm = AlgorithmId::in_network;
      return std::make_unique<FailoverOperation>(part, *paths.switch_paths[path], team_.position(), team_.size());
    }
    part.algorithm = AlgorithmId::ring;
    return make_algorithm(part, paths, team_);
  });
}

Split::~Split() { share_path(false); }

void Split::share_path(bool with_own) {
  for (const auto& path : paths_.switch_paths) path->share_path(with_own);
}

Progress Split::poll(std::int64_t now_ns) {
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

Progress Split::poll_parts(std::int64_t now_ns) {
  const Progress progress = parts_->poll(now_ns);
  if (progress == Progress::failed) return fail(parts_->failure());
  counts_ = parts_->counts();
  note_ends();
  return progress;
}

void Split::note_ends() {
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

void Split::start_agreement() {
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

void Split::learn() {
  if (rates_.back() != 0) return paths_.shares->skip();
  std::vector<Shares::Rates> path_rates;
  for (std::size_t path = 0; path <= switches_; ++path) {
    path_rates.push_back({.beside = static_cast<std::uint64_t>(rates_[2 * path]),
                          .alone = static_cast<std::uint64_t>(
                              rates_[2 * path + 1] == kUnmeasured ? 0 : std::abs(rates_[2 * path + 1]))});
  }
  paths_.shares->learn(path_rates);
}

void Split::wait_for(WaitSet& set) const { agreement_ != nullptr ? agreement_->wait_for(set) : parts_->wait_for(set); }

std::vector<int> Split::awaited() const { return agreement_ != nullptr ? agreement_->awaited() : parts_->awaited(); }

bool Split::awaited_may_wait() const { return agreement_ != nullptr || parts_->awaited_may_wait(); }

}  // namespace netfold::collective
