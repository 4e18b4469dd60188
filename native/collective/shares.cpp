#include <netfold/collective/shares.hpp>

#include <algorithm>
#include <numeric>

namespace netfold::collective {
namespace {

__extension__ using Wide = unsigned __int128;

// The rates of so many first operations replace the known rates: those were measured in milliseconds. Later rates are
// averaged with the known ones.
constexpr std::uint64_t kSure = 3;
// A rate that changes by more than 1 / kDrift has drifted.
constexpr std::uint64_t kDrift = 5;
// The paths go together only if that is faster than alone by 1 / kWorth.
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
    paths_.push_back({.beside = std::max<std::uint64_t>(1, scaled(each, used, all)),
                      .alone = std::max<std::uint64_t>(1, scaled(each, std::min(all, link), all))});
  }
  paths_.push_back({.beside = std::max<std::uint64_t>(1, scaled(host, link - used, link)), .alone = host});
}

std::vector<std::uint32_t> Shares::balanced() const {
  if (!fixed_.empty()) {
    std::vector<std::uint32_t> parts = fixed_;
    parts.push_back(kWhole - std::accumulate(fixed_.begin(), fixed_.end(), 0U));
    return parts;
  }
  const Rates& host = paths_.back();
  std::uint64_t together = host.beside;
  std::uint64_t switches = 0;
  for (std::size_t path = 0; path + 1 < paths_.size(); ++path) {
    together += paths_[path].beside;
    switches += paths_[path].alone;
  }
  const bool joins = together - together / kWorth > std::max(switches, host.alone);
  std::vector<std::uint32_t> parts(paths_.size());
  if (!joins && host.alone >= switches) {
    parts.back() = kWhole;
    return parts;
  }
  std::uint32_t left = kWhole;
  for (std::size_t path = 0; path + 1 < paths_.size(); ++path) {
    parts[path] = static_cast<std::uint32_t>(joins ? scaled(kWhole, paths_[path].beside, together)
                                                   : scaled(kWhole, paths_[path].alone, switches));
    if (parts[path] < kWhole / kLeastPart) parts[path] = 0;
    left -= parts[path];
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
  for (std::size_t path = 0; path + 1 < parts.size(); ++path) {
    const std::uint32_t wanted = std::max(parts[path] / kTrialPart, kWhole / kLeastPart);
    const std::uint32_t moved = std::min(wanted, more ? host : parts[path]);
    parts[path] += more ? moved : -moved;
    host -= more ? moved : -moved;
  }
  return parts;
}

void Shares::learn(std::span<const Rates> paths) {
  bool drifted = false;
  const bool host_did_all = std::all_of(paths.begin(), paths.end() - 1,
                                        [](const Rates& rates) { return rates.beside == 0 && rates.alone == 0; });
  const auto update = [&](std::uint64_t& known_rate, std::uint64_t rate) {
    if (rate == 0) return;
    const bool is_far = rate / 2 > known_rate || known_rate / 2 > rate;
    const std::uint64_t next =
        std::max<std::uint64_t>(1, operations_ < kSure || is_far ? rate : (known_rate + rate) / 2);
    drifted |= is_drift(known_rate, next);
    known_rate = next;
  };
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    Rates& known = paths_[path];
    Rates measured = paths[path];
    // Just after the switches have ended, the host algorithm's connections are still as slow as beside them.
    if (path + 1 == paths_.size() && !host_did_all && measured.alone < known.alone) measured.alone = 0;
    update(known.beside, measured.beside);
    // No path is slower alone than beside others: such a rest was too short to measure.
    update(known.alone, measured.alone == 0 ? 0 : std::max(measured.alone, measured.beside));
    if (known.beside <= known.alone) continue;
    if (measured.beside == 0) {
      known.beside = known.alone;
    } else {
      known.alone = known.beside;
    }
  }
  skip();
  if (drifted) {
    learn_until_ = operations_ + kEvery / 2;
    between_trials_ = kFirstTrial;
    next_trial_ = std::min(next_trial_, operations_ + between_trials_);
  }
}

void Shares::skip() {
  if (is_trial()) {
    ++trials_;
    between_trials_ = std::min<std::uint64_t>(between_trials_ * kTrialGrowth, kLastTrial);
    next_trial_ = operations_ + 1 + between_trials_;
  }
  ++operations_;
}

}  // namespace netfold::collective
