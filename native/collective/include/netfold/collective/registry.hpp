// Which algorithms there are. A new one is a file of its own and a line here.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/collective/in_network.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shared_node.hpp>

#include <memory>

namespace netfold::collective {

// Throws std::invalid_argument with a sentence for a call by `rank` of `ranks` that can never be right: an
// operator without meaning for the dtype, a missing or uneven buffer, a root that does not exist.
void validate(const Call& call, int rank, int ranks);

// The ways between the ranks of a group that an algorithm can take.
struct Paths {
  transport::Mesh& mesh;
  Channel* channel = nullptr;             // to the switch, if the group joined one
  transport::SharedNode* node = nullptr;  // memory of all ranks of the group, if they share it
};

// The machine that runs `call`; nullptr where there is nothing to do. Borrows the call and what the paths point to.
std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths);

}  // namespace netfold::collective
