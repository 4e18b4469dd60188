// Faults by wrapping: a wire that holds its user to the letter of the rules, over any that works.
//
// It takes every liberty that endpoint.hpp grants a provider. What is handed to it goes to the wire below at some later
// `poll`, so memory that is touched too early shows as other bytes at the other end. Completions come shuffled, and
// some of them late. Calls are refused for now, about every third. Memory must be registered, also where the wire below
// does not care, and each kind of use for itself; a Work is scribbled on while it is under way. Messages are small, and
// nothing but a header can be injected. That a write landed is told before or after any message, as it falls. Who
// breaks a rule, or frees memory that is registered, is told so by a std::logic_error. All by a seed: the same calls
// meet the same faults.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

namespace netfold::transport::fabric {

struct Strictness {
  std::uint64_t seed = 1;
  std::uint64_t fails = 0;  // after so many sends all fail, with a completion that says so; 0: never
  std::uint64_t loses = 0;  // after so many sends all are lost, and seem to be sent; 0: never
  std::uint64_t drops = 0;  // one of so many is lost likewise; 0: none
};

std::unique_ptr<Endpoint> make_strict(std::unique_ptr<Endpoint> below, const Strictness& strictness);

// A wire as users name it: a provider of libfabric (libfabric.hpp), or strict+PROVIDER;
// strict:seed=7:fails=100+PROVIDER says more of it (Strictness), rail=1 of that rail alone. Throws Error.
std::unique_ptr<Endpoint> open_named_endpoint(const std::string& name, const std::string& host, int rail);

}  // namespace netfold::transport::fabric
