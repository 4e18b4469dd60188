#include <netfold/collective/borrowed.hpp>

namespace netfold::collective {

void Borrowed::hold(const Call& call, transport::Mesh& mesh) {
  const auto add = [&](const Buffer& buffer) {
    if (buffer.bytes == 0) return;
    if (auto hold = mesh.hold(buffer.data, buffer.bytes)) holds_.push_back(std::move(hold));
  };
  for (const Buffer& output : call.outputs) add(output);
  for (const Buffer& input : call.inputs) {
    const auto is_same = [&](const Buffer& output) { return output.data == input.data && output.bytes == input.bytes; };
    if (std::none_of(call.outputs.begin(), call.outputs.end(), is_same)) add(input);
  }
}

Algorithm::Registrations Borrowed::registrations() const {
  Algorithm::Registrations all;
  for (const auto& hold : holds_) all += {hold->hits(), hold->misses()};
  return all;
}

}  // namespace netfold::collective
