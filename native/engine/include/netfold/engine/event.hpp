// The event record: one fixed-size struct an operation, the raw material of every profile.
#pragma once

#include <cstdint>

namespace netfold::engine {

// Times are CLOCK_MONOTONIC nanoseconds. Python reads arrays of this as a NumPy structured dtype
// (netfold.profile.record); append fields at the end only.
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

}  // namespace netfold::engine
