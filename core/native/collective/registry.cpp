#include <netfold/collective/sharded.hpp>
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <stdexcept>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

void require(bool holds, const Call& call, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(name(call.kind)) + ": " + what);
}

bool reduces(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }

std::unique_ptr<Algorithm> make_in_network(const Call& call, const Paths& paths, Team) {
  const auto make = [&](const Call& part, std::size_t shard) {
    return std::make_unique<FailoverOperation>(part, *paths.switch_paths[shard]);
  };
  if (paths.switch_paths.size() == 1) return make(call, 0);
  return std::make_unique<Sharded>(call, paths.switch_paths.size(), make);
}

std::unique_ptr<Algorithm> make_shared_memory(const Call& call, const Paths& paths, Team team) {
  return (reduces(call.kind) ? make_shm_reduce : make_shm_copy)(call, paths, std::move(team));
}

std::unique_ptr<Algorithm> make_trees(const Call& call, const Paths& paths, Team team) {
  const bool has_blocks = call.kind == Kind::gather || call.kind == Kind::scatter;
  return (has_blocks ? make_binomial_blocks : make_tree)(call, paths, std::move(team));
}

constexpr std::uint32_t kinds(auto... each) { return (std::uint32_t{0} | ... | (1u << static_cast<int>(each))); }
constexpr std::uint32_t kCollectives =
    kinds(Kind::all_reduce, Kind::broadcast, Kind::all_gather, Kind::reduce_scatter, Kind::all_to_all, Kind::reduce,
          Kind::gather, Kind::scatter, Kind::barrier);

// By AlgorithmId.
struct Entry {
  std::uint32_t kinds;  // that it can run, by bit
  Make* make;
};
constexpr Entry kEntries[kAlgorithmCount] = {
    {kCollectives, make_direct},                                                   // local
    {kCollectives, make_direct},                                                   // direct
    {kinds(Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather), make_ring},  // ring
    {kinds(Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::reduce_scatter, Kind::all_gather, Kind::barrier),
     make_in_network},                                                                         // in_network
    {kCollectives, make_shared_memory},                                                        // shared_memory
    {kinds(Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather), make_halving_doubling},  // halving_doubling
    {kinds(Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::gather, Kind::scatter), make_trees},  // tree
    {kCollectives, make_hierarchical},                                                                  // hierarchical
    {kinds(Kind::all_gather, Kind::all_to_all, Kind::barrier), make_bruck},                             // bruck
    {kinds(Kind::all_to_all), make_direct},                                                             // pairwise
    {kinds(Kind::broadcast), make_tree},                                                                // chain
    {kinds(), make_direct},                 // point_to_point
    {kinds(Kind::all_reduce), make_split},  // split
};
const Entry& entry_of(AlgorithmId algorithm) { return kEntries[static_cast<std::size_t>(algorithm)]; }

}  // namespace

void validate(const Call& call, int rank, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  const bool is_root = rank == call.root;
  if (is_transfer(call.kind)) {
    const bool sends = call.kind == Kind::send;
    const std::string peer = std::string("rank ") + std::to_string(call.root);
    require((call.root >= 0 && call.root < ranks) || (!sends && call.root == kAnySource), call,
            peer + " is not a rank of this group of " + std::to_string(ranks));
    require(!is_root, call, peer + " is this rank itself; copy the tensor instead");
    require(ranks > 1, call, "this group has no other rank");
    require(call.tag >= 0 || call.is_internal, call, "tag " + std::to_string(call.tag) + " is negative");
    require((sends ? call.inputs : call.outputs).size() == 1, call, "takes one tensor");
    return;
  }
  require(call.root >= 0 && call.root < ranks, call,
          "root " + std::to_string(call.root) + " is not a rank of this group of " + std::to_string(ranks));
  if (reduces(call.kind)) {
    require(kernels::is_defined(call.reduce, call.dtype), call,
            std::string(kernels::name(call.reduce)) + " is not defined for " + kernels::name(call.dtype));
    require(
        call.average == Averaging::none || (call.reduce == kernels::ReduceOp::sum && kernels::can_average(call.dtype)),
        call,
        std::string("avg is not defined for ") + kernels::name(call.dtype) +
            (call.dtype == kernels::DType::boolean ? "; max is any, min all" : ""));
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
  require(!outputs_overlap(call), call, "two of the outputs overlap, so the result would depend on chance");
  if (call.kind == Kind::all_reduce && !call.inputs.empty()) {
    const Buffer &residual = call.inputs[0], &tensor = call.outputs[0];
    require(residual.data + residual.bytes <= tensor.data || tensor.data + tensor.bytes <= residual.data, call,
            "the residual overlaps the tensor");
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
  return (entry_of(algorithm).kinds >> static_cast<int>(kind) & 1) != 0;
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
  if (call.copies_inputs) return make_copied_inputs(call, paths);
  if (call.is_quantised() && paths.mesh.size() > 1 && call.elements() > 0) return make_quantised(call, paths);
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
      return make_shm_call_check(call, paths, std::move(algorithm));
  }
}

std::unique_ptr<Algorithm> make_algorithm(const Call& call, const Paths& paths, Team team) {
  const bool is_direct = team.size() == 1 || call.algorithm == AlgorithmId::direct;
  if (!is_direct && call.kind == Kind::all_reduce && call.elements() == 0) return nullptr;
  return (is_direct ? make_direct : entry_of(call.algorithm).make)(call, paths, std::move(team));
}

}  // namespace netfold::collective
