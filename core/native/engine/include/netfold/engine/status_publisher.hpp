// A group's entry in the status segment: written by the group, and read back as a sentence.
#pragma once

#include <netfold/collective/call.hpp>
#include <netfold/engine/operation.hpp>
#include <netfold/engine/status.hpp>

#include <cstdint>
#include <string>

namespace netfold::engine {

// Owns the entry. Every member does nothing where the segment has no entry left.
class StatusPublisher {
 public:
  // The operations that a group has under way.
  struct UnderWay {
    bool switch_is_lost = false;
    std::size_t collectives = 0;  // under way and queued
    const Operation* oldest = nullptr;
    std::size_t transfers = 0;
    const Operation* oldest_transfer = nullptr;
  };

  StatusPublisher(std::uint64_t group, const std::string& job, int rank, int size);
  ~StatusPublisher() { StatusSegment::instance().close(entry_); }
  StatusPublisher(const StatusPublisher&) = delete;
  StatusPublisher& operator=(const StatusPublisher&) = delete;

  void joined_switch();
  // Of the driver: before each sleep, and when `under_way` changed.
  void publish(const UnderWay& under_way);
  void completed(const Operation& operation, const collective::Failure& failure, std::size_t collectives,
                 std::size_t transfers);
  void nothing_under_way();

  // Under the lock of the group's inbox. A caller's thread begins and ends to wait or drive.
  void enter(std::int64_t now);
  void leave(std::int64_t now);
  // Likewise. An operation is submitted, and done.
  void begin_operation(std::int64_t now);
  void end_operation(std::int64_t now);

  // The present activity of this rank, for ranks that wait for it: a sentence without its subject. From any thread.
  std::string describe() const;

 private:
  StatusEntry* entry_;
  int inside_ = 0;     // caller threads
  int under_way_ = 0;  // operations
};

}  // namespace netfold::engine
