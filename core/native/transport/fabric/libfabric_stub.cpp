// Replaces libfabric.cpp where netfold is built without libfabric's headers.
#include <netfold/transport/fabric/libfabric.hpp>

namespace netfold::transport::fabric {
namespace {

[[noreturn]] void absent() {
  throw Error(
      "this netfold was built without libfabric's headers; install them (apt install libfabric-dev) and build it "
      "again");
}

}  // namespace

std::string library_version() { absent(); }
std::vector<Provider> list_providers() { absent(); }
std::unique_ptr<Endpoint> open_endpoint(const std::string&, const std::string&, int, Gpus, Numbers) { absent(); }

}  // namespace netfold::transport::fabric
