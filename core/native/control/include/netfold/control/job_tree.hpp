// The switches above each worker, and the tree that a job makes of them.
//
// Every worker asks its switch for the path to the root (query_path_to_root of membership.hpp). One of them cuts all
// paths at the lowest switch that all contain, and lists for each switch what contributes to it. A join has the levels
// from the joined switch to the root of the job, and no other worker. netfold/switch_protocol/job_tree.py describes the
// levels, and makes the same of the same paths.
#pragma once

#include <netfold/control/msgpack.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace netfold::control {

// As in netfold/switch_protocol/job_tree.py.
inline constexpr std::size_t kMaxTreeDepth = 8;
inline constexpr std::size_t kMaxJobWorkers = 4096;

// A worker's switches, from its own to the root.
struct PathToRoot {
  std::vector<std::uint32_t> ids;
  std::vector<std::string> endpoints;  // as NETFOLD_SWITCH names them
  std::string error;                   // why the last switch did not report what is above it; empty: it did

  // From the reply of the switch at `endpoint`, or from message(). Throws ProtocolError.
  explicit PathToRoot(const Value& message, const std::string& endpoint = {});
  // For another worker.
  Value message() const;
};

// By the id of the switch that a worker joins, the `tree` of its join. Empty: all workers join one switch.
// paths: of worker 0, 1, ..., whose ranks are the same numbers.
// Throws std::runtime_error with a sentence for paths that form no tree, and where more contribute to a switch than it
// adds for.
std::map<std::uint32_t, Value> trees_of(std::span<const PathToRoot> paths);

}  // namespace netfold::control
