#include <netfold/collective/shares.hpp>

#include <algorithm>
#include <numeric>

namespace netfold::collective {
namespace {

__extension__ using Wide = unsigned __int128;

// So many operations are believed at once: what came before them was measured in milliseconds. Of a later difference
// half.
constexpr std::uint64_t kSure = 3;
// A rate that changes by more than one part in kDrift is another one.
constexpr std::uint64_t kDrift = 5;
// One part in kWorth more than alone, or the ways do not go together.
constexpr std::uint64_t kWorth = 32;

std::uint64_t scaled(std::uint64_t value, std::uint64_t times, std::uint64_t over) {
  return static_cast<std::uint64_t>(Wide{value} * times / std::max<std::uint64_t>(1, over));
}

bool is_drift(std::uint64_t before, std::uint64_t after) {
  const std::uint64_t difference = before > after ? before - after : after - before;
  return difference * kDrift > before;
}

}  // namespace

Shares::Shares(std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link,
               std::vector<std::uint32_t> fixed)
    : fixed_(std::move(fixed)) {
  const std::uint64_t all = std::accumulate(switches.begin(), switches.end(), std::uint64_t{0});
  const std::uint64_t used = all >= link ? link / 2 : all;
  for (const std::uint64_t each : switches) {
    ways_.push_back({.beside = std::max<std::uint64_t>(1, scaled(each, used, all)),
                     .alone = std::max<std::uint64_t>(1, scaled(each, std::min(all, link), all))});
  }
  ways_.push_back({.beside = std::max<std::uint64_t>(1, scaled(host, link - used, link)), .alone = host});
}

std::vector<std::uint32_t> Shares::balanced() const {
  if (!fixed_.empty()) {
    std::vector<std::uint32_t> parts = fixed_;
    parts.push_back(kWhole - std::accumulate(fixed_.begin(), fixed_.end(), 0U));
    return parts;
  }
  const Rates& host = ways_.back();
  std::uint64_t together = host.beside;
  std::uint64_t switches = 0;
  for (std::size_t way = 0; way + 1 < ways_.size(); ++way) {
    together += ways_[way].beside;
    switches += ways_[way].alone;
  }
  const bool joins = together - together / kWorth > std::max(switches, host.alone);
  std::vector<std::uint32_t> parts(ways_.size());
  if (!joins && host.alone >= switches) {
    parts.back() = kWhole;
    return parts;
  }
  std::uint32_t left = kWhole;
  for (std::size_t way = 0; way + 1 < ways_.size(); ++way) {
    parts[way] = static_cast<std::uint32_t>(joins ? scaled(kWhole, ways_[way].beside, together)
                                                  : scaled(kWhole, ways_[way].alone, switches));
    if (parts[way] < kWhole / kLeastPart) parts[way] = 0;
    left -= parts[way];
  }
  if (joins && left >= kWhole / kLeastPart) {
    parts.back() = left;
  } else {
    *std::max_element(parts.begin(), parts.end() - 1) += left;
  }
  return parts;
}

std::vector<std::uint32_t> Shares::parts() const {
  std::vector<std::uint32_t> parts = balanced();
  if (!is_trial()) return parts;
  std::uint32_t& host = parts.back();
  if (host > 0 && host < kWhole && trials_ % 3 == 2) {
    std::fill(parts.begin(), parts.end(), 0);
    host = kWhole;
    return parts;
  }
  const bool more = host == kWhole || (host > 0 && trials_ % 3 == 0);  // to the switches
  for (std::size_t way = 0; way + 1 < parts.size(); ++way) {
    const std::uint32_t some = std::max(parts[way] / kTrialPart, kWhole / kLeastPart);
    const std::uint32_t moved = std::min(some, more ? host : parts[way]);
    parts[way] += more ? moved : -moved;
    host -= more ? moved : -moved;
  }
  return parts;
}

void Shares::learn(std::span<const Rates> ways) {
  bool drifted = false;
  const bool host_did_all =
      std::all_of(ways.begin(), ways.end() - 1, [](const Rates& seen) { return seen.beside == 0 && seen.alone == 0; });
  const auto believe = [&](std::uint64_t& kept, std::uint64_t seen) {
    if (seen == 0) return;
    const bool is_far = seen / 2 > kept || kept / 2 > seen;
    const std::uint64_t next = std::max<std::uint64_t>(1, operations_ < kSure || is_far ? seen : (kept + seen) / 2);
    drifted |= is_drift(kept, next);
    kept = next;
  };
  for (std::size_t way = 0; way < ways_.size(); ++way) {
    Rates& known = ways_[way];
    Rates seen = ways[way];
    // After the switches have ended its connections are still as slow as beside them for a while.
    if (way + 1 == ways_.size() && !host_did_all && seen.alone < known.alone) seen.alone = 0;
    believe(known.beside, seen.beside);
    // Nothing is slower alone: a rest that says so was too short.
    believe(known.alone, seen.alone == 0 ? 0 : std::max(seen.alone, seen.beside));
    if (known.beside <= known.alone) continue;
    if (seen.beside == 0) {
      known.beside = known.alone;
    } else {
      known.alone = known.beside;
    }
  }
  pass();
  if (drifted) {
    learn_until_ = operations_ + kEvery / 2;
    between_trials_ = kFirstTrial;
    next_trial_ = std::min(next_trial_, operations_ + between_trials_);
  }
}

void Shares::pass() {
  if (is_trial()) {
    ++trials_;
    between_trials_ = std::min<std::uint64_t>(between_trials_ * kTrialGrowth, kLastTrial);
    next_trial_ = operations_ + 1 + between_trials_;
  }
  ++operations_;
}

}  // namespace netfold::collective
