// A table of times for NCCL's algorithms and protocols (core/src/netfold/tuning/nccl.py writes it), and the choice by it.
//
//     netfold-nccl-tuning 1
//     least-gain 0.2
//     shape 16 2
//     all_reduce 65536 tree LL 153.2 0
//     end
//
// A shape is a number of ranks and of hosts, for which the lines below it hold: a collective, its bytes as NCCL counts
// them, an algorithm, a protocol, microseconds, and the number of channels, 0 for NCCL's own. What follows # is a comment.
//
// NCCL's choice is changed only to a combination that NCCL itself offers, for which the table's time is less by
// `least-gain` than for NCCL's choice, and whose time by NCCL's estimate is at most kMostApart times that of its choice:
// NCCL multiplies what would lose precision (a ring of f8) by a larger number. Between two sizes the logarithm of the
// time is interpolated; nothing is assumed beyond them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace netfold::nccl {

class Tuning {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{4} << 20;  // of a file
  static constexpr float kMostApart = 8;

  struct Choice {
    int algorithm, protocol;
    int channels;  // 0: NCCL's own
  };

  // Throws std::invalid_argument with the line and what is wrong in it.
  static Tuning parse(std::string_view text);
  // Throws std::invalid_argument, and std::system_error if the file cannot be read.
  static Tuning read(const std::string& path);

  bool has(int ranks, int hosts) const { return shapes_.contains({ranks, hosts}); }
  // table: NCCL's times, [algorithms * protocols]. Nothing: NCCL's own choice stays.
  std::optional<Choice> choose(int ranks, int hosts, int function, std::size_t bytes, std::span<const float> table,
                               int protocols) const;
  // The text's; never 0.
  std::uint32_t checksum() const { return checksum_; }

 private:
  struct Row {
    double bytes = 0, log_us = 0;
    int channels = 0;
  };
  using Series = std::vector<Row>;                            // by bytes
  using Shape = std::map<std::tuple<int, int, int>, Series>;  // by function, algorithm, protocol

  static std::optional<Row> at(const Shape& shape, int function, int algorithm, int protocol, std::size_t bytes);

  double least_gain_ = 0;
  std::map<std::pair<int, int>, Shape> shapes_;
  std::uint32_t checksum_ = 0;
};

// The checksum of NETFOLD_NCCL_TUNER's file; 0 where there is none, or it cannot be used. Ranks that choose differently
// would wait for each other or add wrong values. So the network compares it between the ends of each connection.
std::uint32_t tuning_checksum();

}  // namespace netfold::nccl
