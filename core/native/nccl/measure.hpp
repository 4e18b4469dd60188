// The choice between the switch and host algorithms, from a measurement by all ranks before the first operation.
//
// The ranks reduce tensors of growing size through the switch, and then by a ring. The least time of all ranks counts,
// since the rank that begins last waits least. The last two sizes give a rate, and the first a fixed time. Where the
// rates say that both at once are the quickest, the ranks try that too, and the quickest of the three is used.
// Operations correct the rates later (collective/shares.hpp).
#pragma once

#include <netfold/engine/group.hpp>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace netfold::nccl {

// Host algorithms alone, for all operations of a collective communicator.
std::vector<collective::Choice> host_choices();

// Algorithms by operation, of those that NCCL asks for.
using Algorithms = std::map<collective::Kind, collective::AlgorithmId>;
// The algorithms that NETFOLD_ALGORITHM names: nothing or `auto`, an algorithm for every operation that it can do,
// or pairs such as `all_reduce=split,all_gather=ring`. Throws std::invalid_argument.
Algorithms parse_algorithms(std::string_view text);

// Before the group's first operation; every rank calls it, with the same `fixed`, whose operations are not chosen here.
// Sets the group's table and shares; measures unless nothing is left to choose. Returns a sentence for the log.
// Throws std::runtime_error where an operation fails.
std::string choose_paths(engine::Group& group, const Algorithms& fixed);

}  // namespace netfold::nccl
