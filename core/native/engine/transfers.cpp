#include <netfold/engine/transfers.hpp>

#include <algorithm>

namespace netfold::engine {

using collective::Failure;
using collective::Progress;

void Transfers::post(std::int64_t now) {
  for (auto& operation : added_) {
    operation->record_.started_ns = now;
    deadline_ns_ = earlier(deadline_ns_, operation->deadline_ns_);
    const auto& posted = posted_.emplace(operation->id_, std::move(operation)).first->second;
    // After a fault of the lane the group is about to fail, and this transfer with it.
    if (!lane_.fault()) lane_.post(posted->id_, posted->call_);
  }
  added_.clear();
}

std::shared_ptr<Operation> Transfers::withdraw(std::uint64_t id) {
  const auto is_meant = [id](const auto& each) { return each->id_ == id; };
  if (const auto added = std::find_if(added_.begin(), added_.end(), is_meant); added != added_.end()) {
    auto operation = std::move(*added);
    added_.erase(added);
    return operation;
  }
  const auto found = posted_.find(id);
  if (found == posted_.end() || !lane_.withdraw(id, found->second->call_)) return nullptr;
  return std::move(posted_.extract(found).mapped());
}

bool Transfers::waits_for_memory() const {
  const auto is_programs = [](const auto& each) { return !each.second->call_.is_internal; };
  return std::any_of(posted_.begin(), posted_.end(), is_programs) && lane_.waits_for_memory();
}

bool Transfers::has_sends() const {
  return !added_.empty() || std::any_of(posted_.begin(), posted_.end(), [](const auto& each) {
    return each.second->call_.kind == collective::Kind::send;
  });
}

bool Transfers::poll(std::int64_t now, Failure& failure, const Complete& complete) {
  if (posted_.empty()) return false;
  const Progress progress = lane_.poll();
  for (const auto& done : lane_.take_done()) {
    auto node = posted_.extract(done.ticket);
    Operation& operation = *node.mapped();
    operation.call_.root = done.peer;
    EventRecord& record = operation.record_;
    record.wire_bytes = done.wire_bytes;
    record.registration_hits = done.registrations.hits;
    record.registration_misses = done.registrations.misses;
    if (operation.call_.kind == collective::Kind::receive) record.slowest_rank = done.peer;
    complete(operation);
  }
  if (progress == Progress::failed) {
    const auto& fault = *lane_.fault();
    failure = fault.failure;
    const auto failed = posted_.find(fault.ticket);
    if (failed != posted_.end()) {
      failure.text = failed->second->describe(lane_.mesh().rank()) + " failed: " + failure.text;
    }
  } else {
    check_deadlines(now, failure);
  }
  return progress == Progress::moved;
}

void Transfers::check_deadlines(std::int64_t now, Failure& failure) {
  if (deadline_ns_ < 0 || now < deadline_ns_) return;
  deadline_ns_ = -1;
  const Operation* expired = nullptr;
  for (const auto& [id, operation] : posted_) {
    const std::int64_t deadline_ns = operation->deadline_ns_;
    if (deadline_ns < 0) continue;
    deadline_ns_ = earlier(deadline_ns_, deadline_ns);
    if (now >= deadline_ns && (expired == nullptr || deadline_ns < expired->deadline_ns_)) expired = operation.get();
  }
  if (expired == nullptr) return;
  failure.kind = Failure::Kind::timeout;
  failure.rank = expired->call_.root;
  failure.text =
      expired->describe_timeout(lane_.mesh().rank()) + "; still waiting for " + lane_.awaited(expired->call_);
}

void Transfers::end_all(const Complete& end) {
  for (; !added_.empty(); added_.pop_front()) end(*added_.front());
  for (; !posted_.empty(); posted_.erase(posted_.begin())) end(*posted_.begin()->second);
}

void Transfers::wait_for(collective::WaitSet& set) const {
  if (posted_.empty()) return;
  lane_.wait_for(set);
  set.wake_at(deadline_ns_);
}

}  // namespace netfold::engine
