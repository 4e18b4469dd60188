// Exhaustive search of admission's last step: which hellos make an address a worker's (protocol/seat.hpp).
//
// A state is every worker's seat, and whether the job has started. In each, every hello may come that somebody can
// send, any number of times: a worker's, with its nonce, from its address and from another one that it has; one that
// claims another worker's seat with its own nonce; one of a former incarnation of the switch and one of another job,
// though with the right nonce; and a stranger's, who knows no nonce.
//
// Safety. A seat has no address but its own worker's, none is answered elsewhere, and none changes after the start.
// Possibility. From every state before the start, each worker's own hello gives it its seat.
#pragma once

#include <netfold/prove/search.hpp>

namespace netfold::prove {

// Throws std::invalid_argument for more than kMaxWorkers, or none. The trace is hellos in words.
Report search_hellos(std::uint16_t workers);

}  // namespace netfold::prove
