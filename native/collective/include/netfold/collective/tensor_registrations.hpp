// A call's tensors, while a fabric may write to them and from them: it then registers each as a whole, and not chunk by
// chunk. Ends with the operation, which is over or has withdrawn by then.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/transport/mesh.hpp>

#include <memory>

namespace netfold::collective {

class TensorRegistrations {
 public:
  void acquire(const Call& call, transport::Mesh& mesh);
  // What that took so far.
  Algorithm::Registrations registrations() const;

 private:
  std::vector<std::unique_ptr<transport::Pipe::RegistrationLease>> leases_;
};

}  // namespace netfold::collective
