#include <netfold/collective/shares.hpp>

#include <algorithm>
#include <functional>
#include <numeric>

namespace netfold::collective {
namespace {

__extension__ using Wide = unsigned __int128;

// A rate that differs from the known one by more than 1 / kDoubt is in doubt: the next operation learns too, and a trial
// is repeated.
constexpr std::uint64_t kDoubt = 5;
// The rates have drifted where a path's part changes by more than kWhole / kDrift. A rate that changes and moves no
// part does not restart the trials: it is noise, or of a path that has no part.
constexpr std::uint32_t kDrift = 16;
// The paths go together only if that is faster than alone by 1 / kWorth.
constexpr std::uint64_t kWorth = 32;

std::uint64_t scaled(std::uint64_t value, std::uint64_t times, std::uint64_t over) {
  return static_cast<std::uint64_t>(Wide{value} * times / std::max<std::uint64_t>(1, over));
}

// rates: as of `Shares::paths`. The host algorithm gets what is left by the switches; a part that is too small to pay
// goes to the host algorithm, and the host algorithm's to the switch with the largest part.
std::vector<std::uint32_t> in_proportion(std::span<const std::uint64_t> rates) {
  constexpr std::uint32_t kLeast = Shares::kWhole / Shares::kLeastPart;
  const std::uint64_t all = std::accumulate(rates.begin(), rates.end(), std::uint64_t{0});
  std::vector<std::uint32_t> parts(rates.size());
  std::uint32_t left = Shares::kWhole;
  for (std::size_t path = 0; path + 1 < rates.size(); ++path) {
    parts[path] = static_cast<std::uint32_t>(scaled(Shares::kWhole, rates[path], all));
    if (parts[path] < kLeast) parts[path] = 0;
    left -= parts[path];
  }
  (left >= kLeast ? parts.back() : *std::max_element(parts.begin(), parts.end() - 1)) += left;
  return parts;
}

// Moves a part of the host algorithm to a switch, or back where `wanted` is negative; at most what there is.
void give(std::vector<std::uint32_t>& parts, std::size_t path, std::int32_t wanted) {
  const auto most = static_cast<std::int32_t>(parts.back());
  const auto least = -static_cast<std::int32_t>(parts[path]);
  const auto moved = static_cast<std::uint32_t>(std::clamp(wanted, least, most));
  parts[path] += moved;
  parts.back() -= moved;
}

bool is_drift(std::uint32_t before, std::uint32_t after) {
  return std::max(before, after) - std::min(before, after) > Shares::kWhole / kDrift;
}

}  // namespace

Shares::Shares(std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link,
               std::vector<std::uint32_t> fixed)
    : fixed_(std::move(fixed)) {
  const std::uint64_t all = std::accumulate(switches.begin(), switches.end(), std::uint64_t{0});
  const std::uint64_t used = all >= link ? link / 2 : all;
  const auto add = [this](std::uint64_t beside, std::uint64_t alone) {
    samples_.emplace_back();
    samples_.back().beside.assume(std::max<std::uint64_t>(1, beside));
    samples_.back().alone.assume(std::max<std::uint64_t>(1, alone));
  };
  for (const std::uint64_t each : switches) add(scaled(each, used, all), scaled(each, std::min(all, link), all));
  add(scaled(host, link - used, link), host);
}

std::vector<Shares::Rates> Shares::paths() const {
  std::vector<Rates> paths;
  for (const PathSamples& path : samples_) paths.push_back({path.beside.median(), path.alone.median()});
  return paths;
}

std::vector<std::uint32_t> Shares::balanced() const {
  if (!fixed_.empty()) {
    std::vector<std::uint32_t> parts = fixed_;
    parts.push_back(kWhole - std::accumulate(fixed_.begin(), fixed_.end(), 0U));
    return parts;
  }
  const std::vector<Rates> known = paths();
  const Rates& host = known.back();
  std::uint64_t together = host.beside;
  std::uint64_t switches = 0;
  std::vector<std::uint64_t> alone;
  for (std::size_t path = 0; path + 1 < known.size(); ++path) {
    together += known[path].beside;
    switches += known[path].alone;
    alone.push_back(known[path].alone);
  }
  if (together - together / kWorth > std::max(switches, host.alone)) return joined();
  if (host.alone < switches) {
    alone.push_back(0);
    return in_proportion(alone);
  }
  std::vector<std::uint32_t> parts(known.size());
  parts.back() = kWhole;
  return parts;
}

std::vector<std::uint32_t> Shares::joined() const {
  std::vector<std::uint64_t> beside;
  for (const PathSamples& path : samples_) beside.push_back(path.beside.median());
  return in_proportion(beside);
}

std::vector<std::uint32_t> Shares::parts() const {
  std::vector<std::uint32_t> parts = balanced();
  if (!is_trial()) return parts;
  const std::uint32_t host = parts.back();
  if (host == kWhole) {
    parts = joined();
    for (std::size_t path = 0; path + 1 < parts.size(); ++path) {
      if (parts[path] == 0) give(parts, path, kWhole / kLeastPart);
    }
    return parts;
  }
  if (host > 0 && trials_ % 3 == 2) {
    std::fill(parts.begin(), parts.end(), 0);
    parts.back() = kWhole;
    return parts;
  }
  const bool more = host > 0 && trials_ % 3 == 0;  // to the switches
  for (std::size_t path = 0; path + 1 < parts.size(); ++path) {
    const auto moved = static_cast<std::int32_t>(std::max(parts[path] / kTrialPart, kWhole / kLeastPart));
    give(parts, path, more ? moved : -moved);
  }
  return parts;
}

void Shares::learn(std::span<const Rates> paths) {
  const std::vector<std::uint32_t> before = balanced();
  const bool host_did_all = std::all_of(paths.begin(), paths.end() - 1,
                                        [](const Rates& rates) { return rates.beside == 0 && rates.alone == 0; });
  bool in_doubt = false;
  const auto update = [&](Samples& samples, std::uint64_t rate) {
    if (rate == 0) return;
    const std::uint64_t known = samples.median();
    in_doubt |= std::max(rate, known) - std::min(rate, known) > known / kDoubt;
    if (rate / 2 > known) samples.assume(rate);
    samples.add(rate);
  };
  for (std::size_t path = 0; path < samples_.size(); ++path) {
    auto& [beside, alone] = samples_[path];
    Rates measured = paths[path];
    // Just after the switches have ended, the host algorithm's connections are still as slow as beside them.
    if (path + 1 == samples_.size() && !host_did_all && measured.alone < alone.median()) measured.alone = 0;
    update(beside, measured.beside);
    // No path is slower alone than beside others: such a rest was too short to measure.
    update(alone, measured.alone == 0 ? 0 : std::max(measured.alone, measured.beside));
    if (beside.median() <= alone.median()) continue;
    if (measured.beside == 0) {
      beside.assume(alone.median());
    } else {
      alone.assume(beside.median());
    }
  }
  if (in_doubt && repeated_ + 1 < Samples::kKept) {
    ++repeated_;
    learn_until_ = std::max(learn_until_, ++operations_ + 1);
  } else {
    repeated_ = 0;
    skip();
  }
  const std::vector<std::uint32_t> after = balanced();
  if (!std::equal(before.begin(), before.end(), after.begin(), std::not_fn(is_drift))) {
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
