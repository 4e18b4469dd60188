// An endpoint for tests that injects faults: it wraps any endpoint, uses every liberty of a provider, and checks its
// user against all rules of endpoint.hpp.
//
// - Operations go to the wrapped endpoint at a later `poll`: memory that is changed too early shows as other bytes at
//   the peer.
// - Completions come in random order, and some of them late. A landed write is reported before or after any message.
// - About every third call is refused for now.
// - All memory must be registered for its kind of use, even where the wrapped endpoint does not require it.
// - A Work is overwritten while it is in progress.
// - Messages are short, and at most a header can be injected.
// - With :hmem=1, "memory of a GPU" is a shared mapping of a file of memfd_create without permissions (PROT_NONE): every
//   direct access ends the process. The wrapped endpoint uses a mapping of its own, which it also reads. With :hmem=2,
//   none can be registered.
//
// A broken rule throws std::logic_error, and so does freeing registered memory. The seed determines all faults.
#pragma once

#include <netfold/transport/fabric/libfabric.hpp>

namespace netfold::transport::fabric {

// Opens an endpoint by the name that users give. Throws Error.
// name: a provider of libfabric (libfabric.hpp), or strict+PROVIDER. strict:seed=7:fails=100+PROVIDER sets fields of
//   Strictness (strict_endpoint.cpp); rail=1 limits faults to that rail.
// gpus: memory of GPUs is to be registered; see Limits::no_gpus.
std::unique_ptr<Endpoint> open_named_endpoint(const std::string& name, const std::string& host, int rail,
                                              Gpus gpus = Gpus::unused);

}  // namespace netfold::transport::fabric
