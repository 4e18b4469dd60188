#include <netfold/collective/binomial_blocks.hpp>
#include <netfold/collective/bruck.hpp>
#include <netfold/collective/direct.hpp>
#include <netfold/collective/halving_doubling.hpp>
#include <netfold/collective/hierarchical.hpp>
#include <netfold/collective/quantised.hpp>
#include <netfold/collective/registry.hpp>
#include <netfold/collective/ring.hpp>
#include <netfold/collective/sharded.hpp>
#include <netfold/collective/shm_call_check.hpp>
#include <netfold/collective/shm_copy.hpp>
#include <netfold/collective/shm_reduce.hpp>
#include <netfold/collective/split.hpp>
#include <netfold/collective/tree.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <stdexcept>

namespace netfold::collective {
namespace {

void require(bool holds, const Call& call, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(name(call.kind)) + ": " + what);
}

std::unique_ptr<Algorithm> in_network(const Call& call, std::span<const std::unique_ptr<SwitchPath>> switch_paths,
                                      int position, int ranks) {
  if (switch_paths.size() == 1) return std::make_unique<FailoverOperation>(call, *switch_paths[0], position, ranks);
  return std::make_unique<Sharded>(call, switch_paths.size(), [&](Call& part, std::size_t shard) {
    return std::make_unique<FailoverOperation>(part, *switch_paths[shard], position, ranks);
  });
}

}  // namespace

void validate(const Call& call, int rank, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  const bool is_root = rank == call.root;
  const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::reduce_scatter;
  if (is_transfer(call.kind)) {
    const bool sends = call.kind == Kind::send;
    const std::string peer = std::string("rank ") + std::to_string(call.root);
    require((call.root >= 0 && call.root < ranks) || (!sends && call.root == kAnySource), call,
            peer + " is not a rank of this group of " + std::to_string(ranks));
    require(!is_root, call, peer + " is this rank itself; copy the tensor instead");
    require(ranks > 1, call, "this group has no other rank");
    require(call.tag >= 0, call, "tag " + std::to_string(call.tag) + " is negative");
    require((sends ? call.inputs : call.outputs).size() == 1, call, "takes one tensor");
    return;
  }
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
      sized(call.outputs, 1, "output");
      require(call.inputs.empty() || (call.inputs.size() == 1 && call.inputs[0].bytes == call.outputs[0].bytes), call,
              "takes one residual, as long as the tensor");
      break;
    case Kind::reduce:
    case Kind::broadcast:
      sized(call.outputs, 1, "output");
      break;
    case Kind::all_gather:
    case Kind::gather:
      sized(call.inputs, 1, "input");
      if (call.kind == Kind::all_gather || is_root) sized(call.outputs, count, "output");
      break;
    case Kind::all_to_all:
      sized(call.inputs, count, "input");
      sized(call.outputs, count, "output");
      break;
    case Kind::reduce_scatter:
    case Kind::scatter:
      if (call.kind == Kind::reduce_scatter || is_root) sized(call.inputs, count, "input");
      sized(call.outputs, 1, "output");
      break;
    case Kind::barrier:
    case Kind::send:
    case Kind::receive:
      break;
  }
  // This rank's own block. The sizes of the other blocks are compared when the messages arrive.
  const Buffer* given = call.given_to(rank, rank);
  const Buffer* taken = call.kind == Kind::reduce_scatter ? &call.outputs[0] : call.taken_from(rank, rank);
  if (given != nullptr && taken != nullptr) {
    require(given->bytes == taken->bytes, call,
            "this rank's own part has " + std::to_string(given->bytes) + " bytes as an input and " +
                std::to_string(taken->bytes) + " as an output");
  }
}

bool supports(AlgorithmId algorithm, Kind kind) {
  const auto is_one_of = [&](auto... kinds) { return ((kind == kinds) || ...); };
  switch (algorithm) {
    case AlgorithmId::local:
    case AlgorithmId::direct:
    case AlgorithmId::shared_memory:
    case AlgorithmId::hierarchical:
      return !is_transfer(kind);
    case AlgorithmId::ring:
    case AlgorithmId::halving_doubling:
      return is_one_of(Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather);
    case AlgorithmId::in_network:
      return is_one_of(Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::reduce_scatter, Kind::all_gather,
                       Kind::barrier);
    case AlgorithmId::tree:
      return is_one_of(Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::gather, Kind::scatter);
    case AlgorithmId::chain:
      return kind == Kind::broadcast;
    case AlgorithmId::bruck:
      return is_one_of(Kind::all_gather, Kind::all_to_all, Kind::barrier);
    case AlgorithmId::pairwise:
      return kind == Kind::all_to_all;
    case AlgorithmId::split:
      return kind == Kind::all_reduce;
    default:
      return false;
  }
}

void validate_choice(const Call& call) {
  require(supports(call.algorithm, call.kind), call, std::string("not supported by ") + name(call.algorithm));
  require(
      call.kind != Kind::all_reduce || call.inputs.empty() || (call.is_quantised() && call.wire == kernels::DType::i8),
      call, "a residual is for sums of f32 that travel as i8; this call rounds nothing");
  if (call.algorithm == AlgorithmId::bruck && call.kind == Kind::all_to_all) {
    const auto equal = [&](const Buffer& buffer) { return buffer.bytes == call.inputs[0].bytes; };
    require(std::all_of(call.inputs.begin(), call.inputs.end(), equal) &&
                std::all_of(call.outputs.begin(), call.outputs.end(), equal),
            call, "bruck needs blocks of equal size, and these differ; pairwise and direct take any sizes");
  }
}

std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths) {
  if (call.is_quantised() && paths.mesh.size() > 1 && call.elements() > 0) {
    return std::make_unique<Quantised>(call, paths);
  }
  auto algorithm = make_algorithm(call, paths, Team::everyone(paths.mesh));
  switch (call.algorithm) {
    case AlgorithmId::local:
    case AlgorithmId::in_network:
    case AlgorithmId::split:
    case AlgorithmId::shared_memory:
    case AlgorithmId::hierarchical:
      return algorithm;
    default:
      if (algorithm == nullptr || paths.node == nullptr) return algorithm;
      return std::make_unique<ShmCallCheck>(call, paths.mesh, *paths.node, std::move(algorithm));
  }
}

std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths, Team team) {
  if (team.size() == 1 || call.algorithm == AlgorithmId::direct) {
    return std::make_unique<Direct>(call, paths.mesh, std::move(team));
  }
  if (call.kind == Kind::all_reduce && call.elements() == 0) return nullptr;
  switch (call.algorithm) {
    case AlgorithmId::ring:
      return std::make_unique<Ring>(call, paths.mesh, std::move(team));
    case AlgorithmId::halving_doubling:
      return std::make_unique<HalvingDoubling>(call, paths.mesh, std::move(team));
    case AlgorithmId::tree:
      if (call.kind == Kind::gather || call.kind == Kind::scatter) {
        return std::make_unique<BinomialBlocks>(call, paths.mesh, std::move(team));
      }
      [[fallthrough]];
    case AlgorithmId::chain:
      return std::make_unique<Tree>(call, paths.mesh, std::move(team));
    case AlgorithmId::bruck:
      return std::make_unique<Bruck>(call, paths.mesh, std::move(team));
    case AlgorithmId::in_network:
      return in_network(call, paths.switch_paths, team.position(), team.size());
    case AlgorithmId::split:
      return std::make_unique<Split>(call, paths, std::move(team));
    case AlgorithmId::shared_memory:
      if (call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::reduce_scatter) {
        return std::make_unique<ShmReduce>(call, paths.mesh, *paths.node);
      }
      return std::make_unique<ShmCopy>(call, paths.mesh, *paths.node);
    case AlgorithmId::hierarchical:
      return std::make_unique<Hierarchical>(call, paths);
    default:
      return std::make_unique<Direct>(call, paths.mesh, std::move(team));
  }
}

}  // namespace netfold::collective
