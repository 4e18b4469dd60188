// The system's libfabric: opened when first asked for, with the headers that were there when netfold was built.
//
// dlopen, and not a link: one build of netfold serves hosts with and without libfabric, and importing netfold loads
// nothing. Only half a dozen of its functions are symbols; all others are reached through tables that it hands out.
// Without the headers netfold builds all the same, and says so to whoever asks for a fabric (libfabric_stub.cpp).
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

namespace netfold::transport::fabric {

// What a provider offers for netfold, or why netfold cannot use it.
struct Provider {
  std::string name;
  std::string version;
  std::string domain;  // the interface or device
  std::size_t message_bytes = 0;
  std::size_t inject_bytes = 0;
  bool can_write = false;                 // RMA
  bool manual = false;                    // moves data only while it is asked to
  std::vector<std::string> registration;  // what it demands of memory
  std::string why_not;                    // empty: it can be used
};

// The version of the library that was opened. Throws Error where there is none, or one that is too old.
std::string library_version();
// Everything that the library finds on this host, endpoints of any type: one entry a provider, domain and address.
std::vector<Provider> list_providers();
// An endpoint of `provider` ("tcp", "tcp;ofi_rxm", "efa", ...), on the interface with the address `host` where the
// provider goes by such addresses, else on its device number `rail`. Throws Error that names what is missing.
enum class Numbers : std::uint8_t { if_needed, always };  // with writes, also where a provider keeps their order
std::unique_ptr<Endpoint> open_endpoint(const std::string& provider, const std::string& host, int rail,
                                        Numbers numbers = Numbers::if_needed);

}  // namespace netfold::transport::fabric
