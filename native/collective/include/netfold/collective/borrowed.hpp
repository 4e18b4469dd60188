// A call's tensors, while a fabric may write to them and from them: it then registers each as a whole, and not piece by
// piece. Ends with the operation, which is over or has withdrawn by then.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/transport/mesh.hpp>

#include <memory>

namespace netfold::collective {

class Borrowed {
 public:
  void hold(const Call& call, transport::Mesh& mesh);
  // What that took so far.
  Algorithm::Registrations registrations() const;

 private:
  std::vector<std::unique_ptr<transport::Pipe::Hold>> holds_;
};

}  // namespace netfold::collective
