// The event record: one fixed-size struct for each operation, from which every profile is made.
#pragma once

#include <netfold/transport/socket.hpp>

#include <cstdint>
#include <vector>

namespace netfold::engine {

using transport::now_ns;  // the clock of every time in this component

// The earlier of two times, where -1 is no time.
inline std::int64_t earlier(std::int64_t one_ns, std::int64_t other_ns) {
  return one_ns < 0 || (other_ns >= 0 && other_ns < one_ns) ? other_ns : one_ns;
}

// Python reads arrays of this struct as a NumPy structured dtype (netfold.profile.record): append fields at the end
// only.
struct EventRecord {
  std::uint64_t group = 0;
  std::uint64_t bytes = 0;       // of the tensor (outputs[0])
  std::uint64_t wire_bytes = 0;  // sent by this rank, headers included
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t finished_ns = 0;
  std::uint32_t sequence = 0;
  std::uint32_t retransmissions = 0;
  std::uint32_t registration_hits = 0;
  std::uint32_t registration_misses = 0;
  std::int32_t slowest_rank = -1;  // -1: not known
  std::uint8_t operation = 0;      // collective::Kind
  std::uint8_t dtype = 0;
  std::uint8_t reduce = 0;
  std::uint8_t algorithm = 0;  // collective::AlgorithmId
  std::uint8_t wire = 0;
  std::uint8_t error = 0;    // collective::Failure::Kind
  std::uint8_t inlined = 0;  // ran on the caller's thread
  std::uint8_t reserved = 0;
  std::uint32_t reserved2 = 0;
};
static_assert(sizeof(EventRecord) == 80);

// The newest kCapacity records of a group, in a ring.
class EventLog {
 public:
  EventLog() { records_.reserve(kCapacity); }  // so that push never allocates

  void push(const EventRecord& record) {
    if (records_.size() < kCapacity) {
      records_.push_back(record);
    } else {
      records_[total_ % kCapacity] = record;
    }
    ++total_;
  }
  void clear() {
    records_.clear();
    total_ = 0;
  }
  // The number of records that were ever pushed.
  std::uint64_t total() const { return total_; }
  // The kept records after the first `since` ever pushed, oldest first.
  std::vector<EventRecord> after(std::uint64_t since) const;

 private:
  static constexpr std::size_t kCapacity = 8192;
  std::vector<EventRecord> records_;
  std::uint64_t total_ = 0;
};

}  // namespace netfold::engine
