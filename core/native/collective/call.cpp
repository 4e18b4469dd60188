#include <netfold/collective/call.hpp>

#include <numeric>

namespace netfold::collective {
const char* name(Kind kind) {
  constexpr const char* kNames[kKindCount] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                              "all_to_all", "reduce",    "gather",     "scatter",
                                              "barrier",    "send",      "receive"};
  const auto value = static_cast<int>(kind);
  return value < kKindCount ? kNames[value] : "?";
}

const char* name(AlgorithmId algorithm) {
  constexpr const char* kNames[kAlgorithmCount] = {
      "local", "direct",   "ring",  "in_network",     "shared_memory", "halving_doubling", "tree", "hierarchical",
      "bruck", "pairwise", "chain", "point_to_point", "split"};
  const auto value = static_cast<int>(algorithm);
  return value < kAlgorithmCount ? kNames[value] : "?";
}

std::uint64_t layout_of(const std::vector<Buffer>& blocks) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const Buffer& block : blocks) {
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((block.bytes >> (8 * byte)) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

std::string coalesced_text(std::uint64_t digest) {
  return " of several tensors (digest of all sizes: " + std::to_string(digest & 0xffff) + ")";
}

Choice choose(const std::vector<Choice>& table, Kind kind, std::uint64_t bytes) {
  Choice chosen{.kind = kind};
  for (const Choice& row : table) {
    if (row.kind == kind && row.min_bytes <= bytes) chosen = row;
  }
  return chosen;
}

bool in_hardware_profile(Kind kind, kernels::DType wire, kernels::ReduceOp reduce) {
  using kernels::DType;
  using kernels::ReduceOp;
  switch (kind) {
    case Kind::broadcast:
    case Kind::all_gather:
    case Kind::barrier:
      return true;  // a bor, whatever the tensor's type
    default:
      return (wire == DType::i32 && (reduce == ReduceOp::sum || reduce == ReduceOp::max)) ||
             (wire == DType::u32 && reduce == ReduceOp::sum);
  }
}

std::uint8_t Call::step() const {
  const bool averages = average != Averaging::none || (step_of & kStepOfAverage) != 0;
  return static_cast<std::uint8_t>((1 + static_cast<int>(kind)) | (averages ? kStepOfAverage : 0));
}

Buffer Call::tensor() const {
  if (kind == Kind::send) return inputs.empty() ? Buffer{} : inputs[0];
  return outputs.empty() ? Buffer{} : outputs[0];
}

const Buffer* Call::given_to(int self, int peer) const {
  switch (kind) {
    case Kind::all_reduce:
      return &outputs[0];
    case Kind::reduce:
      return peer == root ? &outputs[0] : nullptr;
    case Kind::broadcast:
      return self == root ? &outputs[0] : nullptr;
    case Kind::all_gather:
      return &inputs[0];
    case Kind::gather:
      return peer == root ? &inputs[0] : nullptr;
    case Kind::all_to_all:
    case Kind::reduce_scatter:
      return &inputs[static_cast<std::size_t>(peer)];
    case Kind::scatter:
      return self == root ? &inputs[static_cast<std::size_t>(peer)] : nullptr;
    default:
      return nullptr;
  }
}

const Buffer* Call::taken_from(int self, int peer) const {
  switch (kind) {
    case Kind::all_gather:
    case Kind::all_to_all:
      return &outputs[static_cast<std::size_t>(peer)];
    case Kind::gather:
      return self == root ? &outputs[static_cast<std::size_t>(peer)] : nullptr;
    case Kind::broadcast:
    case Kind::scatter:
      return peer == root ? &outputs[0] : nullptr;
    default:
      return nullptr;
  }
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
