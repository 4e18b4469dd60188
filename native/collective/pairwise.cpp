#include <netfold/collective/pairwise.hpp>

namespace netfold::collective {

Pairwise::Pairwise(const Call& call, transport::Mesh& mesh, Team team)
    : call_(call), mesh_(mesh), self_(team.position()) {
  const int me = team.position();
  bool has_rma = false;
  for (int step = 1; step < team.size(); ++step) {
    const int to = team.wrapped(me + step);
    const int from = team.wrapped(me - step);
    const Buffer& outbound = call.inputs[static_cast<std::size_t>(to)];
    const Buffer& inbound = call.outputs[static_cast<std::size_t>(from)];
    outgoing_.emplace_back(call, team.rank(to), outbound.data, outbound.bytes, Among::only);
    incoming_.emplace_back(call, team.rank(from), inbound.data, inbound.bytes, Among::only);
    has_rma |= mesh.uses_rma(team.rank(to), std::min(outbound.bytes, kRmaChunkBytes)) ||
               mesh.uses_rma(team.rank(from), std::min(inbound.bytes, kRmaChunkBytes));
  }
  if (has_rma) tensor_registrations_.acquire(call, mesh);
}

Progress Pairwise::poll(std::int64_t) {
  bool moved = false;
  while (may_send() && !failure_) {
    const std::size_t bytes = outgoing_[sent_].advance(mesh_, failure_);
    wire_bytes_ += bytes;
    moved |= bytes > 0;
    if (!outgoing_[sent_].done()) break;
    ++sent_;
  }
  if (!begun_) {
    begun_ = true;
    call_.copy_own_block(self_);
  }
  // Read after a failed send too: a peer that gave up sends an abort before it closes its connection.
  for (std::size_t step = received_; step < std::min(incoming_.size(), received_ + kAtOnce); ++step) {
    if (incoming_[step].done()) continue;
    Failure reported;
    moved |= incoming_[step].advance(mesh_, reported) > 0;
    if (reported) {
      failure_ = std::move(reported);
      break;
    }
  }
  if (failure_) return Progress::failed;
  while (received_ < incoming_.size() && incoming_[received_].done()) ++received_;
  if (sent_ == outgoing_.size() && received_ == incoming_.size()) {
    registrations_ = tensor_registrations_.registrations();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::idle;
}

void Pairwise::wait_for(WaitSet& set) const {
  if (may_send()) mesh_.wait_for(outgoing_[sent_].peer(), outgoing_[sent_].events(), set.fds);
  for (std::size_t step = received_; step < std::min(incoming_.size(), received_ + kAtOnce); ++step) {
    if (!incoming_[step].done()) mesh_.wait_for(incoming_[step].peer(), POLLIN, set.fds);
  }
}

std::vector<int> Pairwise::awaited() const {
  std::vector<int> ranks;
  for (const Incoming& message : incoming_) {
    if (!message.done()) ranks.push_back(message.peer());
  }
  if (ranks.empty() && sent_ < outgoing_.size()) ranks.push_back(outgoing_[sent_].peer());
  return ranks;
}

}  // namespace netfold::collective
