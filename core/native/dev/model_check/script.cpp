#include "script.hpp"

#include <netfold/protocol/worker.hpp>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace netfold::model_check {
namespace {

// Contributions are numbers in [kNumbers, 2 * kNumbers), shifted by kWorkerBits for each worker.
constexpr std::int64_t kNumbers = 1024;
constexpr int kWorkerBits = 16;
constexpr std::uint32_t kGenerations = kMaxRestarts + 1;  // most incarnations, and most epochs of one
static_assert(kGenerations * kGenerations * kMaxChunks <= kNumbers);

std::uint64_t chunks_of(const Script::Operations& operations) {
  return std::accumulate(operations.begin(), operations.end(), std::uint64_t{0});
}

void require(bool holds, const std::string& complaint) {
  if (!holds) throw std::invalid_argument(complaint);
}

void check(const Scope& scope, std::uint64_t chunks) {
  require(scope.workers > 0 && scope.workers <= kMaxWorkers,
          "a scope has 1 to " + std::to_string(kMaxWorkers) + " workers");
  constexpr std::size_t kMaxOperations = protocol::Worker::kMaxOperations;
  const auto is_zero = [](std::uint32_t each) { return each == 0; };
  require(!scope.operations.empty() && chunks <= kMaxChunks && scope.operations.size() <= kMaxOperations &&
              scope.last.size() <= kMaxOperations && std::ranges::none_of(scope.operations, is_zero) &&
              std::ranges::none_of(scope.last, is_zero),
          "a scope has 1 to " + std::to_string(kMaxChunks) + " chunks, in 1 to " + std::to_string(kMaxOperations) +
              " operations, none of them empty");
  require(scope.restarts <= kMaxRestarts, "a scope has at most " + std::to_string(kMaxRestarts) + " restarts");
  require(scope.numbers > 0 || scope.timeouts == 0, "timeouts are counted only in a scope with packet numbers");
  require(scope.numbers == 0 || (scope.last.empty() && scope.network == Network::monotone &&
                                 scope.numbers * kMaxNumbers <= std::numeric_limits<std::uint32_t>::max()),
          "a scope with packet numbers has a monotone network, and all of its workers call the same");
  require(scope.pipelines >> (1 + scope.leaves.size()) == 0, "a scope has no pipelines beside its switches");
  require(scope.chunk_bits == 0 || (scope.pipelines != 0 && scope.chunk_bits <= kMostChunkBits),
          "chunk_bits, up to " + std::to_string(kMostChunkBits) + ", is for pipelines");
  require(scope.chunk_bits == 0 || std::bit_ceil(2 * scope.window) < 1U << (scope.chunk_bits - 1),
          "a pipeline has more chunk numbers of each sign than slots");
  require(!scope.rogue || scope.chunk_bits <= 3, "a rogue worker's pipeline compares at most 3 bits of a chunk");
  require(!scope.outlives || (scope.pipelines == 1 && scope.leaves.empty() && scope.restarts == 1),
          "a pipeline without leaves outlives one restart");
  require(!scope.rogue || (scope.leaves.empty() && scope.workers > 1 && scope.operations.size() == 1 &&
                           scope.last.empty() && scope.restarts == 0 && scope.numbers == 0 && chunks <= kRogueChunks),
          "a rogue worker has others beside it, and is below no leaf; all call one operation of up to " +
              std::to_string(kRogueChunks) + " chunks, without restarts and numbers");
  const auto below = std::accumulate(scope.leaves.begin(), scope.leaves.end(), std::uint32_t{0});
  require(scope.leaves.empty() || (std::ranges::none_of(scope.leaves, is_zero) && scope.leaves.size() <= kMaxLeaves &&
                                   below == scope.workers),
          "a scope has no leaves, or 1 to " + std::to_string(kMaxLeaves) + " with all of its workers below them");
}

}  // namespace

std::string text_of(Generation generation) {
  return std::to_string(generation.incarnation) + "." + std::to_string(generation.epoch);
}

Script::Script(const Scope& scope)
    : scope_(scope), chunk_count_(std::max(chunks_of(scope.operations), chunks_of(scope.last))) {
  check(scope, chunk_count_);
}

const Script::Operations& Script::operations_of(std::uint16_t worker) const {
  return !scope_.last.empty() && worker + 1 == scope_.workers ? scope_.last : scope_.operations;
}

std::uint32_t Script::operation_at(const Operations& operations, std::uint64_t chunk) {
  std::uint32_t operation = 0;
  while (operation < operations.size() && chunk >= operations[operation]) chunk -= operations[operation++];
  return operation;
}

bool Script::agreed(std::uint64_t chunk) const {
  if (scope_.last.empty()) return true;
  const std::uint32_t usual = operation_at(scope_.operations, chunk);
  const std::uint32_t last = operation_at(scope_.last, chunk);
  return usual == last && usual < scope_.operations.size() && last < scope_.last.size() &&
         scope_.operations[usual] == scope_.last[last];
}

std::uint64_t Script::chunk_of(std::uint16_t worker, std::uint32_t operation, std::uint64_t first) const {
  const Operations& operations = operations_of(worker);
  if (operation >= operations.size() || first >= operations[operation]) return chunk_count_;
  return std::accumulate(operations.begin(), operations.begin() + operation, first);
}

std::int64_t Script::contribution(Generation generation, std::uint16_t worker, std::uint64_t chunk) const {
  const std::uint64_t index = (generation.incarnation - 1) * kGenerations + (generation.epoch - 1);
  return (kNumbers + static_cast<std::int64_t>(index * kMaxChunks + chunk)) << (kWorkerBits * worker);
}

bool Script::is_result(Generation generation, std::uint64_t chunk, std::int64_t value) const {
  const auto honest = static_cast<std::uint16_t>(scope_.workers - (scope_.rogue ? 1 : 0));
  for (std::uint16_t worker = 0; worker < honest; ++worker) value -= contribution(generation, worker, chunk);
  if (!scope_.rogue) return value == 0;
  const std::int64_t number = value >> (kWorkerBits * honest);
  return value == number << (kWorkerBits * honest) && number >= kNumbers && number < 2 * kNumbers;
}

std::string Script::describe_sum(std::int64_t sum) const {
  std::string parts;
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const std::int64_t number = (sum >> (kWorkerBits * worker) & 0xffff) - kNumbers;
    parts += (worker == 0 ? " worker " : ", worker ") + std::to_string(worker);
    if (number < 0) {
      parts += " nothing";
    } else if (number >= kNumbers) {
      parts += " several";
    } else {
      const auto index = static_cast<std::uint32_t>(number / kMaxChunks);
      parts += " chunk " + std::to_string(number % kMaxChunks) + " of " +
               text_of({index / kGenerations + 1, index % kGenerations + 1});
    }
  }
  return parts;
}

}  // namespace netfold::model_check
