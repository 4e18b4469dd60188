#include <netfold/collective/in_network.hpp>

namespace netfold::collective {

InNetwork::InNetwork(const Call& call, Channel& channel, const ContributionMap& map)
    : channel_(channel), token_(channel.start(call, map)) {}

InNetwork::~InNetwork() { channel_.release(token_); }

Progress InNetwork::poll(std::int64_t now_ns) {
  const Progress progress = channel_.poll(now_ns);
  const Channel::Active& active = channel_.active(token_);
  counts_.wire_bytes = active.wire_bytes;
  counts_.retransmissions = active.retransmissions;
  counts_.slowest_rank = active.last_rank;
  if (active.finished) return Progress::done;
  return progress == Progress::failed ? fail(channel_.failure()) : progress;
}

}  // namespace netfold::collective
