// Registrations of a call's tensors with a fabric, each as a whole and not chunk by chunk, for as long as the fabric
// may read or write them. They end with the operation, which by then is complete or has cancelled its transfers.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/transport/mesh.hpp>

#include <memory>

namespace netfold::collective {

class TensorRegistrations {
 public:
  void acquire(const Call& call, transport::Mesh& mesh);
  // Hits and misses of the registration cache so far.
  Algorithm::Registrations registrations() const;

 private:
  std::vector<std::unique_ptr<transport::Pipe::RegistrationLease>> leases_;
};

}  // namespace netfold::collective
