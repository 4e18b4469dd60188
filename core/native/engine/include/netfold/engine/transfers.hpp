// Sends and receives of a group: the driver posts them to the lane, and completes them in any order.
#pragma once

#include <netfold/collective/point_to_point.hpp>
#include <netfold/engine/operation.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>

namespace netfold::engine {

// Only the driver calls it. Costs no time while there is no transfer.
class Transfers {
 public:
  using Complete = std::function<void(Operation&)>;

  explicit Transfers(std::unique_ptr<transport::Mesh> lane) : lane_(std::move(lane)) {}

  collective::PointToPoint& lane() { return lane_; }
  const collective::PointToPoint& lane() const { return lane_; }
  // Transfers in the lane.
  std::size_t size() const { return posted_.size(); }
  bool empty() const { return posted_.empty(); }
  // Whether a transfer of the program waits for a rank that shares memory. Internal messages are not polled for: all
  // ranks of a host await them at the same time.
  bool waits_for_memory() const;
  bool has_sends() const;
  const Operation* oldest() const { return posted_.empty() ? nullptr : posted_.begin()->second.get(); }

  // Leaves `operation` in place where memory is short.
  void add(std::shared_ptr<Operation>&& operation) { added_.push_back(std::move(operation)); }
  // Post the added transfers to the lane.
  void post(std::int64_t now);
  // Take a receive back; null: its message has begun to arrive, or it is done.
  std::shared_ptr<Operation> withdraw(std::uint64_t id);
  // Poll the lane and call `complete` for each transfer that is done. True: something moved. A fault of the lane or a
  // passed deadline sets `failure`.
  bool poll(std::int64_t now, collective::Failure& failure, const Complete& complete);
  // Call `end` for each transfer, and remove the transfer after its call returned.
  void end_all(const Complete& end);
  void wait_for(collective::WaitSet& set) const;

 private:
  void check_deadlines(std::int64_t now, collective::Failure& failure);

  collective::PointToPoint lane_;
  std::deque<std::shared_ptr<Operation>> added_;
  std::map<std::uint64_t, std::shared_ptr<Operation>> posted_;  // by id: the oldest first
  std::int64_t deadline_ns_ = -1;                               // not after the earliest deadline of posted_; -1: none
};

}  // namespace netfold::engine
