#include <netfold/collective/tensor_registrations.hpp>

namespace netfold::collective {

void TensorRegistrations::acquire(const Call& call, transport::Mesh& mesh) {
  const auto add = [&](const Buffer& buffer) {
    if (buffer.bytes == 0) return;
    if (auto lease = mesh.lease(buffer.data, buffer.bytes)) leases_.push_back(std::move(lease));
  };
  for (const Buffer& output : call.outputs) add(output);
  for (const Buffer& input : call.inputs) {
    const auto is_same = [&](const Buffer& output) { return output.data == input.data && output.bytes == input.bytes; };
    if (std::none_of(call.outputs.begin(), call.outputs.end(), is_same)) add(input);
  }
}

Algorithm::Registrations TensorRegistrations::registrations() const {
  Algorithm::Registrations all;
  for (const auto& lease : leases_) all += {lease->hits(), lease->misses()};
  return all;
}

}  // namespace netfold::collective
