#include <netfold/collective/call.hpp>

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
    case AlgorithmId::point_to_point:
      return "point_to_point";
  }
  return "?";
}

Buffer Call::tensor() const {
  if (kind == Kind::send) return inputs.empty() ? Buffer{} : inputs[0];
  return outputs.empty() ? Buffer{} : outputs[0];
}

std::size_t Call::elements() const { return tensor().bytes / kernels::element_bytes(dtype); }

}  // namespace netfold::collective
