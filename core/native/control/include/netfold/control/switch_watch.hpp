// Decides whether a switch is lost, from the results that arrive and from its replies over the control connection.
//
// The rules of netfold/communicator/switch_watch.py, which explains them, for processes without Python. A value without
// clock, thread or socket. core/tests/control/test_native_switch_watch.py gives both the same events.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace netfold::control {

// For one rank at one switch. Times are of any monotonic clock.
class SwitchWatch {
 public:
  // Longer than several of the protocol's longest timeouts.
  static constexpr std::int64_t kQuietNs = 1'000'000'000;
  static constexpr std::int64_t kAliveNs = 1'000'000'000;
  static constexpr std::int64_t kAnswerNs = 3'000'000'000;
  // From the first moment without a result. At least two replies have come by then.
  static constexpr std::int64_t kPathNs = 2'500'000'000;
  static constexpr std::int64_t kTickNs = 500'000'000;

  // A query to the switch. chunk: the one that this rank waits for; nullopt: only whether the switch replies.
  struct Query {
    std::optional<std::uint64_t> chunk;
  };
  // `why` is a clause after "the switch at ... is gone".
  struct Lost {
    std::string why;
  };
  using Action = std::variant<std::monostate, Query, Lost>;

  SwitchWatch(int rank, std::int64_t now_ns) : rank_(rank), last_tick_ns_(now_ns) {}

  // Returns the action that is due.
  // chunk: the oldest one without a result; nullopt where this rank waits for none.
  // urgent: query without waiting for kQuietNs, since a rank has left.
  Action poll(std::int64_t now_ns, std::optional<std::uint64_t> chunk, bool urgent = false);
  // The reply to the open query.
  // missing: ranks that the switch waits for; nullopt for a query without a chunk, and where the switch does not know.
  void answer(const std::optional<std::vector<int>>& missing);
  // The switch's last reply about the chunk.
  const std::vector<int>& stragglers() const { return stragglers_; }

 private:
  int rank_;
  std::int64_t last_tick_ns_;
  std::int64_t time_ns_ = 0;  // a long tick counts as kTickNs
  std::optional<std::uint64_t> chunk_;
  std::int64_t since_ns_ = 0;  // when the wait for the chunk began
  std::optional<Query> asked_;
  std::int64_t asked_ns_ = 0;
  std::int64_t next_ask_ns_ = kAliveNs;
  bool asked_of_chunk_ = false;  // whether the newest query was about the chunk
  int bad_answers_ = 0;
  std::vector<int> stragglers_;
};

}  // namespace netfold::control
