#include "measure.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace netfold::nccl {
namespace {

using collective::AlgorithmId;
using collective::Call;
using collective::Choice;
using collective::Kind;
using collective::Shares;
using kernels::DType;
using transport::now_ns;

constexpr std::array kKinds{Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter};

constexpr std::size_t kWarmUpBytes = 4 << 10, kFirstBytes = 64 << 10, kMostBytes = 4 << 20, kGrowth = 4;
// A size that takes so long is the last one.
constexpr std::int64_t kEnoughNs = 20'000'000;
constexpr std::int64_t kOperationNs = 20'000'000'000;

void run(engine::Group& group, Call call) {
  const auto operation = group.submit(std::move(call), kOperationNs, true);
  group.wait(*operation, -1);
  if (operation->failure()) throw std::runtime_error(operation->failure().text);
}

// The least of all ranks' values.
std::int64_t least(engine::Group& group, std::int64_t own) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(group.size()));
  Call call{.kind = Kind::all_gather, .dtype = DType::i64};
  call.inputs = {{reinterpret_cast<std::byte*>(&own), sizeof own}};
  for (auto& each : all) call.outputs.push_back({reinterpret_cast<std::byte*>(&each), sizeof each});
  run(group, std::move(call));
  return std::ranges::min(all);
}

// The time of n bytes: fixed_s + n / bytes_per_s.
struct Line {
  double fixed_s = 0;
  double bytes_per_s = 1;
  std::size_t largest = kFirstBytes;  // that was measured

  // The size from which the other takes less time; 0: always, infinite: never.
  double crossing(const Line& other) const {
    const double a_byte = 1 / bytes_per_s - 1 / other.bytes_per_s;
    const double fixed = other.fixed_s - fixed_s;
    if (a_byte <= 0) return fixed < 0 ? 0 : HUGE_VAL;
    return std::max(0.0, fixed / a_byte);
  }
};

// The time of an all_reduce, the same on all ranks.
std::int64_t time_of(engine::Group& group, AlgorithmId algorithm, std::size_t bytes) {
  group.set_table({{.kind = Kind::all_reduce, .algorithm = algorithm}, {.kind = Kind::all_gather}}, 1);
  std::vector<float> values(bytes / sizeof(float));
  Call call{.kind = Kind::all_reduce, .dtype = DType::f32, .wire = DType::f32};
  call.outputs = {{reinterpret_cast<std::byte*>(values.data()), bytes}};
  const std::int64_t began_ns = now_ns();
  run(group, std::move(call));
  return least(group, now_ns() - began_ns);
}

Line measured(engine::Group& group, AlgorithmId algorithm) {
  time_of(group, algorithm, kWarmUpBytes);
  std::vector<std::pair<std::size_t, std::int64_t>> times;
  for (std::size_t bytes = kFirstBytes; bytes <= kMostBytes; bytes *= kGrowth) {
    times.emplace_back(bytes, time_of(group, algorithm, bytes));
    if (times.size() > 1 && times.back().second > kEnoughNs) break;
  }
  const auto [smaller, shorter] = times[times.size() - 2];
  const auto [larger, longer] = times.back();
  Line line;
  line.largest = larger;
  line.bytes_per_s =
      static_cast<double>(larger - smaller) * 1e9 / static_cast<double>(std::max<std::int64_t>(1, longer - shorter));
  line.fixed_s = std::max(0.0, static_cast<double>(times[0].second) / 1e9 - kFirstBytes / line.bytes_per_s);
  return line;
}

// The quickest of the switch, a ring and both at once, by the better of two turns. Both at once have to be
// clearly quicker: they learn by slow trials, and hosts that lack the processors for both lose by them.
AlgorithmId quickest(engine::Group& group, std::size_t bytes) {
  constexpr std::array kAll{AlgorithmId::in_network, AlgorithmId::ring, AlgorithmId::split};
  constexpr double kLeastGain = 1.1;
  std::array<double, kAll.size()> times{};
  for (int turn = 0; turn < 2; ++turn) {
    for (std::size_t i = 0; i < kAll.size(); ++i) {
      const auto time = static_cast<double>(time_of(group, kAll[i], bytes));
      times[i] = turn == 0 ? time : std::min(times[i], time);
    }
  }
  times[2] *= kLeastGain;
  return kAll[static_cast<std::size_t>(std::ranges::min_element(times) - times.begin())];
}

// A row from this size on.
std::uint64_t size_of(double bytes, double least_bytes, double most_bytes) {
  return static_cast<std::uint64_t>(std::clamp(bytes, least_bytes, most_bytes));
}

}  // namespace

std::vector<Choice> host_choices() {
  constexpr std::uint64_t kRingBytes = 256 << 10;
  return {{.kind = Kind::all_reduce, .algorithm = AlgorithmId::halving_doubling},
          {.kind = Kind::all_reduce, .min_bytes = kRingBytes, .algorithm = AlgorithmId::ring},
          {.kind = Kind::all_gather, .algorithm = AlgorithmId::direct},
          {.kind = Kind::all_gather, .min_bytes = kRingBytes, .algorithm = AlgorithmId::ring},
          {.kind = Kind::reduce_scatter, .algorithm = AlgorithmId::direct},
          {.kind = Kind::reduce_scatter, .min_bytes = kRingBytes, .algorithm = AlgorithmId::ring}};
}

Algorithms parse_algorithms(std::string_view text) {
  Algorithms algorithms;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("NETFOLD_ALGORITHM=" + std::string(text) + ": " + why);
  };
  const auto named = [&](std::string_view name) {
    for (const AlgorithmId each : {AlgorithmId::direct, AlgorithmId::ring, AlgorithmId::in_network,
                                   AlgorithmId::halving_doubling, AlgorithmId::split}) {
      if (name == collective::name(each)) return each;
    }
    refuse("CollNet has direct, ring, halving_doubling, in_network and split");
    return AlgorithmId::local;
  };
  if (text.empty() || text == "auto") return algorithms;
  if (text.find('=') == std::string_view::npos) {
    const AlgorithmId algorithm = named(text);
    for (const Kind kind : kKinds) {
      if (collective::supports(algorithm, kind)) algorithms[kind] = algorithm;
    }
    return algorithms;
  }
  for (auto left = text; !left.empty();) {
    const auto comma = std::min(left.find(','), left.size());
    const auto pair = left.substr(0, comma);
    left.remove_prefix(std::min(comma + 1, left.size()));
    const auto equals = std::min(pair.find('='), pair.size());
    const auto is_named = [&](Kind each) { return pair.substr(0, equals) == collective::name(each); };
    const auto kind = std::ranges::find_if(kKinds, is_named);
    if (kind == kKinds.end()) continue;  // an operation that NCCL does not ask for
    const auto name = pair.substr(std::min(equals + 1, pair.size()));
    if (name == "auto") continue;
    algorithms[*kind] = named(name);
    if (!collective::supports(algorithms[*kind], *kind)) refuse(std::string(pair) + " is not possible");
  }
  return algorithms;
}

std::string choose_paths(engine::Group& group, const Algorithms& fixed) {
  const auto is_split = [](const auto& each) { return each.second == AlgorithmId::split; };
  if (fixed.size() == kKinds.size() && std::ranges::none_of(fixed, is_split)) {
    std::vector<Choice> table;
    for (const auto& [kind, algorithm] : fixed) table.push_back({.kind = kind, .algorithm = algorithm});
    group.set_table(std::move(table), 2);
    return "NETFOLD_ALGORITHM says how";
  }
  const Line through_switch = measured(group, AlgorithmId::in_network);
  const Line ring = measured(group, AlgorithmId::ring);
  // A ring's all_gather has half the steps and half the bytes.
  const Line half_ring{ring.fixed_s / 2, 2 * ring.bytes_per_s, ring.largest};
  const double ranks = group.size();
  const double link = std::max(ring.bytes_per_s * 2 * (ranks - 1) / ranks, through_switch.bytes_per_s);
  const auto rate = [](double value) { return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(value)); };
  const Shares shares({rate(through_switch.bytes_per_s)}, rate(ring.bytes_per_s), rate(link), {});
  const std::uint32_t part = shares.balanced().front();

  group.set_shares(shares);
  const bool is_chosen = fixed.contains(Kind::all_reduce);
  const AlgorithmId large = part == Shares::kWhole || is_chosen
                                ? AlgorithmId::in_network
                                : quickest(group, std::min(through_switch.largest, ring.largest));

  // A smaller operation gives no rates, and has no parts to speak of.
  constexpr double kLeastSplit = 16 << 10, kMostSplit = Shares::kLearnBytes;
  const double split_from = part == Shares::kWhole ? kMostSplit : through_switch.crossing(ring);
  constexpr double kMostBytesOfAll = 1e15;
  const double ring_from = through_switch.crossing(half_ring);
  std::vector<Choice> table;
  const auto add = [&](Kind kind, AlgorithmId of_large, std::uint64_t from) {
    if (const auto found = fixed.find(kind); found != fixed.end()) {
      table.push_back({.kind = kind, .algorithm = found->second});
      return;
    }
    table.push_back({.kind = kind, .algorithm = AlgorithmId::in_network});
    table.push_back({.kind = kind, .min_bytes = from, .algorithm = of_large});
  };
  add(Kind::all_reduce, large, size_of(split_from, kLeastSplit, kMostSplit));
  add(Kind::all_gather, AlgorithmId::ring, size_of(ring_from, kLeastSplit, kMostBytesOfAll));
  add(Kind::reduce_scatter, AlgorithmId::ring, size_of(ring_from, kLeastSplit, kMostBytesOfAll));
  group.set_table(std::move(table), 2);

  const double through = large == AlgorithmId::in_network ? 1
                         : large == AlgorithmId::ring     ? 0
                                                          : static_cast<double>(part) / Shares::kWhole;
  char text[200];
  std::snprintf(text, sizeof text, "the switch returns %.0f MB/s, a ring %.0f", through_switch.bytes_per_s / 1e6,
                ring.bytes_per_s / 1e6);
  if (is_chosen) return std::string(text) + "; NETFOLD_ALGORITHM says how an all_reduce goes";
  const std::size_t end = std::strlen(text);
  std::snprintf(text + end, sizeof text - end, ": %.0f%% of a large all_reduce goes through the switch", 100 * through);
  return text;
}

}  // namespace netfold::nccl
