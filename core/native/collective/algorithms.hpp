// The algorithms, each in a file of its own. Only that file knows the algorithm's class; registry.cpp knows its maker.
#pragma once

#include <netfold/collective/registry.hpp>

namespace netfold::collective {

// Makes an algorithm for two ranks or more. Borrows the call and what the paths point to. The call's root and buffers
// are indexed by position in `team`.
using Make = std::unique_ptr<Algorithm>(const Call& call, const Paths& paths, Team team);
Make make_binomial_blocks;
Make make_bruck;
Make make_direct;  // for one rank, too
Make make_halving_doubling;
Make make_hierarchical;  // among all ranks of the mesh
Make make_ring;
Make make_shm_copy;    // among all ranks of the node
Make make_shm_reduce;  // likewise
Make make_split;
Make make_tree;

bool outputs_overlap(const Call& call);

// These run other algorithms.
std::unique_ptr<Algorithm> make_copied_inputs(const Call& call, const Paths& paths);
std::unique_ptr<Algorithm> make_quantised(const Call& call, const Paths& paths);
// `algorithm`: the call over the mesh.
std::unique_ptr<Algorithm> make_shm_call_check(const Call& call, const Paths& paths,
                                               std::unique_ptr<Algorithm> algorithm);

}  // namespace netfold::collective
