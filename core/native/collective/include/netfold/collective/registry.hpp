// The list of algorithms. ARCHITECTURE.md names the places of a new one.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/collective/shares.hpp>
#include <netfold/collective/switch_path.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <memory>
#include <span>

namespace netfold::collective {

// Checks a call by `rank` of `ranks`. Throws std::invalid_argument with a sentence for an operator that is undefined
// for the dtype, a missing or uneven buffer, outputs that overlap, or a root that does not exist.
void validate(const Call& call, int rank, int ranks);

// The ranks by host, for hierarchical calls (host_map.hpp).
class HostMap;
// `nodes`: the number of each rank's host. `rank`: this one.
std::shared_ptr<const HostMap> make_host_map(std::span<const int> nodes, int rank);

// The paths between the ranks of a group that an algorithm can use.
struct Paths {
  transport::Mesh& mesh;
  std::span<const std::unique_ptr<SwitchPath>> switch_paths = {};  // to the switches that the group joined
  transport::ShmNode* node = nullptr;  // memory that this rank shares with other ranks, or null
  const HostMap* hosts = nullptr;      // the ranks of each host, or null where all count as one
  Shares* shares = nullptr;            // of the switch paths and a ring, or null where unknown
};

// Whether an output overlaps an input that is needed later.
bool needs_copied_inputs(const Call& call, int rank);
// Whether the algorithm can run calls of that kind. The planner reads this table.
bool supports(AlgorithmId algorithm, Kind kind);
// Throws std::invalid_argument with a sentence where the algorithm chosen for `call` cannot run it.
void validate_choice(const Call& call);

// Makes the algorithm that runs `call`; nullptr where there is nothing to do. Borrows the call and what the paths point
// to. With
// `copies_inputs`, the algorithm works on a copy of the inputs.
std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths);
// The same among some of the ranks. The call's root and buffers are indexed by position in `team`.
std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths, Team team);

}  // namespace netfold::collective
