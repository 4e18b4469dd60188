// The script of a scope: which operations each worker calls, and which values it contributes. Pure functions.
#pragma once

#include <netfold/model_check/search.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace netfold::model_check {

// Most packets of one sender in a scope with packet numbers.
inline constexpr std::uint64_t kMaxNumbers = 64;
// Most bits of a chunk that a pipeline compares, and the chunks that a rogue worker contributes to: all numbers of one
// bit more.
inline constexpr std::uint32_t kMostChunkBits = 5;
inline constexpr std::uint64_t kRogueChunks = 16;

// The identity of a job between two restarts. A switch that restarts starts its epochs anew.
struct Generation {
  std::uint32_t incarnation = 1;
  std::uint32_t epoch = 1;
  bool operator==(const Generation&) const = default;
};
std::string text_of(Generation generation);

class Script {
 public:
  using Operations = std::vector<std::uint32_t>;  // chunks of each operation

  // Throws std::invalid_argument for a scope that is contradictory or beyond a bound.
  explicit Script(const Scope& scope);

  // Chunks of the longest sequence of operations.
  std::uint64_t chunk_count() const { return chunk_count_; }
  const Operations& operations_of(std::uint16_t worker) const;
  // Returns the index of the operation with that chunk; operations.size() for a chunk beyond the last operation.
  static std::uint32_t operation_at(const Operations& operations, std::uint64_t chunk);
  // Whether all workers call the same operation at that chunk.
  bool agreed(std::uint64_t chunk) const;
  // Returns the worker's chunk with that element of the operation; chunk_count() where there is none.
  std::uint64_t chunk_of(std::uint16_t worker, std::uint32_t operation, std::uint64_t first) const;

  std::int64_t contribution(Generation generation, std::uint16_t worker, std::uint64_t chunk) const;
  // Whether a value is the sum of all contributions. A rogue worker's contribution may be any one of its own.
  bool is_result(Generation generation, std::uint64_t chunk, std::int64_t value) const;
  // Describes which contributions a sum consists of.
  std::string describe_sum(std::int64_t sum) const;

 private:
  Scope scope_;
  std::uint64_t chunk_count_ = 0;
};

}  // namespace netfold::model_check
