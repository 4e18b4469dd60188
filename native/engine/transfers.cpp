// Sends and receives in a group's turn: what goes to the lane and comes back from it.
#include <netfold/engine/engine.hpp>

#include <algorithm>

namespace netfold::engine {

using collective::Failure;
using collective::Progress;

void Group::begin_transfers(std::int64_t now) {
  for (auto& operation : arrived_) {
    operation->record_.started_ns = now;
    const std::int64_t deadline_ns = operation->deadline_ns_;
    if (deadline_ns >= 0 && (transfer_deadline_ns_ < 0 || deadline_ns < transfer_deadline_ns_)) {
      transfer_deadline_ns_ = deadline_ns;
    }
    const auto& kept = transfers_.emplace(operation->id_, std::move(operation)).first->second;
    // After a fault the group is about to fail, and this with it.
    if (!lane_->fault()) lane_->post(kept->id_, kept->call_);
  }
  arrived_.clear();
}

bool Group::progress_transfers(std::int64_t now, Failure& failure) {
  if (transfers_.empty()) return false;
  const Progress progress = lane_->poll();
  for (const auto& done : lane_->take_done()) {
    auto node = transfers_.extract(done.ticket);
    Operation& operation = *node.mapped();
    operation.call_.root = done.peer;
    EventRecord& record = operation.record_;
    record.wire_bytes = done.wire_bytes;
    record.registration_hits = done.registrations.hits;
    record.registration_misses = done.registrations.misses;
    if (operation.call_.kind == collective::Kind::receive) record.slowest_rank = done.peer;
    complete(operation, {});
  }
  if (progress == Progress::failed) {
    const auto& fault = *lane_->fault();
    failure = fault.failure;
    const auto who = transfers_.find(fault.ticket);
    if (who != transfers_.end()) failure.text = describe(*who->second) + " failed: " + failure.text;
  } else {
    check_transfer_deadlines(now, failure);
  }
  return progress == Progress::moved;
}

void Group::check_transfer_deadlines(std::int64_t now, Failure& failure) {
  if (transfer_deadline_ns_ < 0 || now < transfer_deadline_ns_) return;
  transfer_deadline_ns_ = -1;
  const Operation* late = nullptr;
  for (const auto& [id, operation] : transfers_) {
    const std::int64_t deadline_ns = operation->deadline_ns_;
    if (deadline_ns < 0) continue;
    if (transfer_deadline_ns_ < 0 || deadline_ns < transfer_deadline_ns_) transfer_deadline_ns_ = deadline_ns;
    if (now >= deadline_ns && (late == nullptr || deadline_ns < late->deadline_ns_)) late = operation.get();
  }
  if (late == nullptr) return;
  failure.kind = Failure::Kind::timeout;
  failure.rank = late->call_.root;
  failure.text =
      describe(*late) + " did not finish within its timeout; still waiting for " + lane_->awaited(late->call_);
}

}  // namespace netfold::engine
