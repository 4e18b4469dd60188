#include <netfold/collective/call.hpp>

#include <cstring>
#include <numeric>

namespace netfold::collective {

const char* name(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::broadcast:
      return "broadcast";
    case Kind::all_gather:
      return "all_gather";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_to_all:
      return "all_to_all";
    case Kind::reduce:
      return "reduce";
    case Kind::gather:
      return "gather";
    case Kind::scatter:
      return "scatter";
    case Kind::barrier:
      return "barrier";
    case Kind::send:
      return "send";
    case Kind::receive:
      return "receive";
  }
  return "?";
}

const char* name(AlgorithmId algorithm) {
  switch (algorithm) {
    case AlgorithmId::local:
      return "local";
    case AlgorithmId::direct:
      return "direct";
    case AlgorithmId::ring:
      return "ring";
    case AlgorithmId::in_network:
      return "in_network";
    case AlgorithmId::shared_memory:
      return "shared_memory";
    case AlgorithmId::halving_doubling:
      return "halving_doubling";
    case AlgorithmId::tree:
      return "tree";
    case AlgorithmId::hierarchical:
      return "hierarchical";
    case AlgorithmId::bruck:
      return "bruck";
    case AlgorithmId::pairwise:
      return "pairwise";
    case AlgorithmId::chain:
      return "chain";
    case AlgorithmId::split:
      return "split";
    case AlgorithmId::point_to_point:
      return "point_to_point";
  }
  return "?";
}

void copy_block(const Buffer& to, const Buffer& from) {
  if (to.bytes > 0 && to.data != from.data) std::memcpy(to.data, from.data, to.bytes);
}

std::uint64_t layout_of(const std::vector<Buffer>& blocks) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const Buffer& block : blocks) {
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((block.bytes >> (8 * byte)) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

std::uint8_t Call::step() const {
  const bool averages = average || (step_of & kStepOfAverage) != 0;
  return static_cast<std::uint8_t>((1 + static_cast<int>(kind)) | (averages ? kStepOfAverage : 0));
}

Buffer Call::tensor() const {
  if (kind == Kind::send) return inputs.empty() ? Buffer{} : inputs[0];
  return outputs.empty() ? Buffer{} : outputs[0];
}

std::size_t Call::elements() const { return tensor().bytes / kernels::element_bytes(dtype); }

std::size_t Call::choice_bytes() const {
  const auto total = [](const std::vector<Buffer>& buffers) {
    return std::accumulate(buffers.begin(), buffers.end(), std::size_t{0},
                           [](std::size_t sum, const Buffer& buffer) { return sum + buffer.bytes; });
  };
  switch (kind) {
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::broadcast:
      return outputs[0].bytes;
    case Kind::all_gather:
      return total(outputs);
    case Kind::reduce_scatter:
    case Kind::all_to_all:
      return total(inputs);
    default:
      return 0;
  }
}

}  // namespace netfold::collective
