// The system's libfabric: opened at its first use, with the headers that were present when netfold was built.
//
// netfold opens it by dlopen instead of linking: one build serves hosts with and without libfabric, and importing
// netfold loads nothing. Only half a dozen of its functions are symbols; all others are in tables that it returns.
// Without the headers netfold still builds, and opening a fabric fails with that reason (libfabric_stub.cpp).
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

namespace netfold::transport::fabric {

// The offer of a provider, or the reason why netfold cannot use it.
struct Provider {
  std::string name;
  std::string version;
  std::string domain;  // the interface or device
  std::size_t message_bytes = 0;
  std::size_t inject_bytes = 0;
  bool can_write = false;                 // RMA
  bool manual = false;                    // data move only in calls (FI_PROGRESS_MANUAL)
  std::vector<std::string> registration;  // its requirements on registered memory
  std::string why_not;                    // empty: netfold can use it
};

// The version of the opened library. Throws Error where there is none, or an old one.
std::string library_version();
// All endpoints that the library finds on this host, of any type: one entry a provider, domain and address.
std::vector<Provider> list_providers();
// Whether writes carry numbers even where the provider orders messages behind writes.
enum class Numbers : std::uint8_t { if_needed, always };
// The error of a registration that the provider refused.
std::string refused_gpu(const std::string& provider, std::size_t bytes, const Memory& memory, const std::string& why);
// Whether memory of GPUs is to be registered. Without it the endpoint is opened as if there were no GPUs.
// stand_in: the host's memory stands in for a GPU's (strict_endpoint.hpp), and the endpoint must be able to read it.
enum class Gpus : std::uint8_t { unused, wanted, stand_in };
// Opens an endpoint. Throws Error that names what is missing, but for memory of GPUs (Limits::no_gpus).
// provider: "tcp", "tcp;ofi_rxm", "efa", ...
// host: the address of the interface, for providers with such addresses.
// rail: the device number, for other providers.
std::unique_ptr<Endpoint> open_endpoint(const std::string& provider, const std::string& host, int rail,
                                        Gpus gpus = Gpus::unused, Numbers numbers = Numbers::if_needed);

}  // namespace netfold::transport::fabric
