// Exhaustive search of admission's last step: which hellos make an address a worker's (protocol/address_validation.hpp).
//
// A state is every worker's seat. In each, every hello may come that somebody can send, any number of times: a worker's
// own, with its nonce and from the address that it named; the same, heard on the wire and sent from elsewhere; one that
// claims another worker's seat with its own nonce; one of a former incarnation of the switch and one of another job,
// though all else is right; and a stranger's, who knows no nonce, from its own address or a forged one.
//
// Safety. No hello changes a seat, or is answered, but the worker's own. Possibility. From every state each worker's
// own hello gives it its address.
#pragma once

#include <netfold/model_check/search.hpp>

namespace netfold::model_check {

// Throws std::invalid_argument for more than kMaxWorkers, or none. The trace is hellos in words.
Report search_validation(std::uint16_t workers);

}  // namespace netfold::model_check
