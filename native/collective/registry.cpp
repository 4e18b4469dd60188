#include <netfold/collective/direct.hpp>
#include <netfold/collective/registry.hpp>
#include <netfold/collective/ring.hpp>
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/reduce.hpp>

#include <stdexcept>

namespace netfold::collective {
namespace {

void require(bool holds, const Call& call, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(name(call.kind)) + ": " + what);
}

}  // namespace

void validate(const Call& call, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::reduce_scatter;
  require(call.root >= 0 && call.root < ranks, call,
          "root " + std::to_string(call.root) + " is not a rank of this group of " + std::to_string(ranks));
  if (reduces) {
    require(kernels::is_defined(call.reduce, call.dtype), call,
            std::string(kernels::name(call.reduce)) + " is not defined for " + kernels::name(call.dtype));
    require(!call.average || kernels::is_float(call.dtype), call,
            std::string("avg needs a floating-point tensor, not ") + kernels::name(call.dtype));
  }
  const auto sized = [&](const std::vector<Buffer>& buffers, std::size_t want, const char* which) {
    require(
        buffers.size() == want, call,
        std::string("needs ") + std::to_string(want) + " " + which + " buffers, not " + std::to_string(buffers.size()));
  };
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::broadcast:
      sized(call.outputs, 1, "output");
      break;
    case Kind::all_gather:
      sized(call.inputs, 1, "input");
      sized(call.outputs, count, "output");
      break;
    case Kind::all_to_all:
      sized(call.inputs, count, "input");
      sized(call.outputs, count, "output");
      break;
    case Kind::reduce_scatter:
      sized(call.inputs, count, "input");
      sized(call.outputs, 1, "output");
      break;
    case Kind::barrier:
    case Kind::gather:
    case Kind::scatter:
      break;  // only the root has both; the binding checks what depends on the rank
  }
}

std::unique_ptr<Algorithm> make_algorithm(const Call& call, transport::Mesh& mesh, Channel* channel) {
  const bool empty = call.kind == Kind::all_reduce && call.elements() == 0;
  switch (call.algorithm) {
    case AlgorithmId::local:
    case AlgorithmId::direct:
      return std::make_unique<Direct>(call, mesh);
    case AlgorithmId::ring:
      return empty ? nullptr : std::make_unique<Ring>(call, mesh);
    case AlgorithmId::in_network:
      return empty ? nullptr : std::make_unique<InNetwork>(call, *channel, mesh.size());
  }
  return nullptr;
}

}  // namespace netfold::collective
