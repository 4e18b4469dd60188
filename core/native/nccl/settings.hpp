// The settings in the environment, read once a process, and NCCL's log.
#pragma once

#include <netfold/auth/records.hpp>
#include <netfold/transport/fabric/registration_cache.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include <netfold/nccl/interface.hpp>

namespace netfold::nccl {

// The way of messages in memory of a GPU. automatic: as `direct` where the provider of a fabric can do that, else `off`.
enum class Cuda : std::uint8_t {
  automatic,
  direct,  // the network's adapter reads and writes it
  staged,  // by way of pinned memory (staging.hpp)
  off      // NCCL's kernels use memory of the host
};

struct Settings {
  auth::Security security = auth::Security::none;  // NETFOLD_SECURITY: none, authenticate, encrypt
  std::vector<std::string> interfaces;             // NETFOLD_INTERFACE, with commas; empty: all that are up
  int first_port = 0, last_port = 0;               // NETFOLD_PORTS: 29600 or 29600-29607; 0: any
  int streams = 1;                                 // NETFOLD_NCCL_STREAMS: TCP connections of a comm, 1 to 8
  std::int64_t reconnect_ns = 10'000'000'000;      // NETFOLD_RECONNECT_S
  std::string job_secret;                          // what NETFOLD_SECRET_FILE holds; empty: there is none
  std::string fabric;                              // NETFOLD_TRANSPORT=fabric:PROVIDER; empty: TCP
  bool is_transport_named = false;                 // NETFOLD_TRANSPORT is not auto
  std::size_t rma_min_bytes = 64 << 10;            // NETFOLD_RMA_MIN_BYTES
  Cuda cuda = Cuda::off;                           // NETFOLD_NCCL_CUDA: auto, direct, staged, off
  transport::fabric::RegistrationCache::Limits registrations;  // NETFOLD_REGISTRATION_CACHE_ENTRIES, _BYTES
  // CollNet's, as they stand in the environment: a wrong one is no reason to go without the network.
  std::string switches;                // NETFOLD_SWITCH
  bool is_switch_required = false;     // NETFOLD_NCCL_REQUIRE_SWITCH: 0 or 1
  std::string token_file;              // NETFOLD_TOKEN_FILE
  std::string job_name;                // NETFOLD_JOB_NAME
  std::string algorithm;               // NETFOLD_ALGORITHM
  std::size_t window_bytes = 1 << 20;  // NETFOLD_WINDOW_BYTES

  // Throws std::invalid_argument or std::runtime_error with a sentence that names the variable.
  static Settings from_environment();
};

// One line of NCCL's log. Nothing before the plugin was initialised.
void set_logger(Logger logger);
void warn(const std::string& text);
void inform(const std::string& text);

}  // namespace netfold::nccl
