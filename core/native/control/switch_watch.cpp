#include <netfold/control/switch_watch.hpp>

#include <algorithm>
#include <utility>

#include "messages.hpp"

namespace netfold::control {

SwitchWatch::Action SwitchWatch::poll(std::int64_t now_ns, std::optional<std::uint64_t> chunk, bool urgent) {
  time_ns_ += std::min(now_ns - last_tick_ns_, kTickNs);
  last_tick_ns_ = now_ns;
  if (chunk != chunk_) {
    chunk_ = chunk;
    since_ns_ = time_ns_;
    bad_answers_ = 0;
    stragglers_.clear();
    asked_of_chunk_ = false;
  }
  if (asked_) {
    const std::int64_t waited_ns = time_ns_ - asked_ns_;
    if (waited_ns >= kAnswerNs) return Lost{"it has not answered for " + seconds(waited_ns)};
    return {};
  }
  const std::int64_t waited_ns = time_ns_ - since_ns_;
  if (chunk_ && bad_answers_ >= 2 && waited_ns >= kPathNs) {
    return Lost{"packets have not passed between it and rank " + std::to_string(rank_) + " for " + seconds(waited_ns) +
                ", though it answers over its control connection: does a firewall drop them, or did the path's MTU "
                "shrink?"};
  }
  const bool is_quiet = chunk_ && (urgent || waited_ns >= kQuietNs);
  if (time_ns_ < next_ask_ns_ && !(is_quiet && (urgent || !asked_of_chunk_))) return {};
  asked_ = Query{is_quiet ? chunk_ : std::nullopt};
  asked_ns_ = time_ns_;
  asked_of_chunk_ = is_quiet;
  next_ask_ns_ = time_ns_ + kAliveNs;
  return *asked_;
}

void SwitchWatch::answer(const std::optional<std::vector<int>>& missing) {
  const std::optional<Query> asked = std::exchange(asked_, std::nullopt);
  if (!asked || !missing || !asked->chunk || asked->chunk != chunk_) return;
  stragglers_ = *missing;
  const bool is_bad = missing->empty() || std::ranges::find(*missing, rank_) != missing->end();
  bad_answers_ = is_bad ? bad_answers_ + 1 : 0;
  if (bad_answers_ == 0) since_ns_ = time_ns_;
}

}  // namespace netfold::control
