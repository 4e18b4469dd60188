// How a failed group ends: in steps, because its operations keep their tensors until no other rank touches them.
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <utility>

namespace netfold::engine {

using collective::Expired;
using collective::Failure;
using transport::ShmNode;

namespace {

std::int64_t revoke_wait_ns = Group::kRevokeNs;

}  // namespace

void Group::set_revoke_wait(std::int64_t ns) { revoke_wait_ns = ns; }

Failure Group::timed_out(const Operation& operation) const {
  Failure failure{.kind = Failure::Kind::timeout, .expired = {operation.call_.sequence, operation.timeout_ns_}};
  failure.text = operation.describe_timeout(rank());
  if (operation.algorithm_ == nullptr) {
    failure.text += "; it did not start, because the operations before it are not done";
    return failure;
  }
  const auto ranks = operation.algorithm_->awaited();
  if (ranks.empty()) return failure;
  failure.rank = ranks.front();
  failure.text += "; still waiting for rank";
  for (const int rank : ranks) failure.text += " " + std::to_string(rank);
  return failure;
}

void Group::share_timeout(Failure& failure) {
  if (failure.kind != Failure::Kind::peer_lost || failure.expired.call == 0) return;
  for (const auto& operation : active_) {
    const Expired expired{operation->call_.sequence, operation->timeout_ns_};
    if (expired != failure.expired || operation->algorithm_ == nullptr) continue;
    Failure shared = timed_out(*operation);
    if (shared.rank < 0) shared.rank = failure.rank;
    shared.remote_reason = failure.remote_reason.empty() ? failure.text : failure.remote_reason;
    failure = std::move(shared);
    inbox_.lock()->failure = failure;
    failure_names_operation_ = true;
    return;
  }
}

void Group::read_failure_in_memory(Failure& failure) const {
  if (node_ == nullptr || failure.kind != Failure::Kind::peer_lost || !failure.remote_reason.empty()) return;
  for (int position = 0; position < node_->size(); ++position) {
    const auto& segment = node_->segment(position);
    if (node_->rank(position) != failure.rank || segment.left.load(std::memory_order_acquire) != ShmNode::kFailed) {
      continue;
    }
    failure.remote_reason.assign(segment.reason, segment.reason_bytes);
    failure.expired = {segment.expired_call, segment.expired_timeout_ns};
    failure.text += "; it gave up on the group: " + failure.remote_reason;
    if (segment.fault_rank >= 0 && segment.fault_rank != rank()) failure.rank = segment.fault_rank;
    return;
  }
}

int Group::user_of_memory() const {
  for (int position = 0; position < node_->size(); ++position) {
    // A process that has ended touches nothing any more.
    if (position != node_->self() && node_->is_used_by(position) && !mesh_->hung_up(node_->rank(position))) {
      return node_->rank(position);
    }
  }
  return -1;
}

bool Group::reclaim_memory(std::int64_t now, Failure& failure) {
  constexpr std::int64_t kFirstLookNs = 20'000;
  constexpr std::int64_t kLastLookNs = 5'000'000;
  if (node_ == nullptr) return true;
  if (revoke_began_ns_ < 0) {
    node_->leave(failure.orderly ? ShmNode::kLeft : ShmNode::kFailed, failure.rank,
                 failure.remote_reason.empty() ? failure.text : failure.remote_reason, failure.expired.call,
                 failure.expired.timeout_ns);
    revoke_began_ns_ = now;
  }
  look_at_users_ns_ = -1;
  const int user = user_of_memory();
  if (user < 0) return true;
  const std::int64_t waited_ns = now - revoke_began_ns_;
  if (waited_ns < revoke_wait_ns) {
    look_at_users_ns_ = now + std::clamp(waited_ns / 4, kFirstLookNs, kLastLookNs);
    return false;
  }
  failure.text += "; rank " + std::to_string(user) +
                  " has been stopped while it reads or writes this rank's tensors, and may do so again when it "
                  "continues: do not use these tensors before its process has ended";
  inbox_.lock()->failure.text = failure.text;
  memory_is_used_ = true;
  return true;
}

std::uint32_t Group::first_unfinished() const {
  if (!active_.empty()) return active_.front()->call_.sequence;
  return queue_.empty() ? inbox_.lock()->next_sequence : queue_.front()->call_.sequence;
}

void Group::fail_all() {
  Failure failure = this->failure();
  const std::int64_t now = now_ns();
  if (close_ns_ < 0) {
    share_timeout(failure);
    // Operations keep their tensors until then, while the other groups of this thread continue.
    if (!reclaim_memory(now, failure)) return;
    const std::uint32_t unfinished = first_unfinished();
    collective::send_abort(*mesh_, failure, unfinished);
    for (const auto& fallback : fallback_meshes_) collective::send_abort(*fallback, failure, unfinished);
    auto& lane = transfers_.lane();
    if (lane.unconfirmed() || has_unsent()) linger_until_ns_ = now + kLingerNs;
    lane.abort(failure);
    // No peer or provider may still use this rank's memory when its caller learns of the failure.
    for_each_mesh([](transport::Mesh& mesh) { mesh.cancel(); });
    // A broken connection looks the same whether its owner died or gave up first. So keep the connections open until
    // the other ranks have detected the dead rank themselves.
    const bool first_hand = failure.kind == Failure::Kind::peer_lost && failure.remote_reason.empty();
    close_ns_ = first_hand ? now + kPeerLostGraceNs : now;
  }
  const auto end = [&](Operation& operation) {
    Failure own = failure;
    if (!failure_names_operation_) own.text = operation.describe(rank()) + " failed: " + failure.text;
    if (memory_is_used_ && operation.owner_ != nullptr) engine_.keep(node_, std::move(operation.owner_));
    complete(operation, std::move(own));
  };
  // An operation leaves its queue after its end, so that the next poll continues where an exception stopped this one.
  for (; !active_.empty(); active_.erase(active_.begin())) end(*active_.front());
  for (; !queue_.empty(); queue_.pop_front()) end(*queue_.front());
  transfers_.end_all(end);
  status_.nothing_under_way();
  // Peers must learn of the failure now: this process may live on for long.
  if (now < close_ns_) return;
  if (needs_progress_) flush();
  if (now < linger_until_ns_ && (transfers_.lane().unconfirmed() || has_unsent())) {
    close_ns_ = now + kLingerStepNs;
    return;
  }
  for_each_mesh([](transport::Mesh& mesh) { mesh.close(); });
  inbox_.lock()->closed = true;
}

}  // namespace netfold::engine
