// Exhaustive search of address validation: which hellos make an address a worker's (protocol/address_validation.hpp).
//
// A state is every worker's AddressValidation. From each state every possible hello may come, any number of times:
// - a worker's own, with its nonce and from the address that it named;
// - the same hello, which an eavesdropper sends from another address;
// - one that names another worker, with the sender's own nonce;
// - one of a former incarnation of the switch, or of another job, and otherwise right;
// - one of an outsider, who knows no nonce, from its own address or from a forged one.
//
// Safety. The switch accepts and returns no hello but the worker's own. Possibility. From every state each worker's own
// hello gives it its address.
#pragma once

#include <netfold/model_check/search.hpp>

namespace netfold::model_check {

// Throws std::invalid_argument for 0 workers, or more than kMaxWorkers. The trace consists of hellos, in words.
Report search_validation(std::uint16_t workers);

}  // namespace netfold::model_check
