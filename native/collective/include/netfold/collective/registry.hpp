// Which algorithms there are. A new one is a file of its own and a line here.
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

// Throws std::invalid_argument with a sentence for a call by `rank` of `ranks` that can never be right: an
// operator without meaning for the dtype, a missing or uneven buffer, a root that does not exist.
void validate(const Call& call, int rank, int ranks);

// The ways between the ranks of a group that an algorithm can take.
struct Paths {
  transport::Mesh& mesh;
  std::span<const std::unique_ptr<SwitchPath>> switch_paths = {};  // to switches, if the group joined any
  transport::ShmNode* node = nullptr;  // memory that this rank shares with others, if it does
  std::span<const int> nodes = {};     // the host of each rank, by a number
  Shares* shares = nullptr;            // of the uplinks and a ring, if it is known
};

// Whether there is a machine for it: written here once, and read by the planner.
bool supports(AlgorithmId algorithm, Kind kind);
// Throws std::invalid_argument with a sentence where the algorithm chosen for `call` cannot run it.
void validate_choice(const Call& call);

// The machine that runs `call`; nullptr where there is nothing to do. Borrows the call and what the paths point to.
std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths);
// The same among a part of the ranks; the call's root and buffers go by position in `team`.
std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths, Team team);

}  // namespace netfold::collective
