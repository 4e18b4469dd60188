// What a rank asked for, and how it can fail: the vocabulary of algorithms and engine.
#pragma once

#include <netfold/kernels/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace netfold::collective {

// The numeric values travel in messages and event records: append only.
enum class Kind : std::uint8_t {
  all_reduce = 0,
  broadcast = 1,
  all_gather = 2,
  reduce_scatter = 3,
  all_to_all = 4,
  reduce = 5,
  gather = 6,
  scatter = 7,
  barrier = 8,
  send = 9,
  receive = 10,
};
inline constexpr int kKindCount = 11;
const char* name(Kind kind);
// Between two ranks: not in step with the group's other calls.
inline bool is_transfer(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

enum class AlgorithmId : std::uint8_t {
  local = 0,
  direct = 1,
  ring = 2,
  in_network = 3,
  shared_memory = 4,
  halving_doubling = 5,
  tree = 6,
  hierarchical = 7,
  bruck = 8,
  pairwise = 9,
  chain = 10,
  point_to_point = 11,
  split = 12,
};
inline constexpr int kAlgorithmCount = 13;
const char* name(AlgorithmId algorithm);

// A receive's `root` when any rank may be the sender.
inline constexpr int kAnySource = -1;

struct Buffer {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// A block that stays with its rank: both have the same size, and may be the same.
void copy_block(const Buffer& to, const Buffer& from);

// A digest of the sizes of all blocks, in order: ranks that disagree about them hear of it.
std::uint64_t layout_of(const std::vector<Buffer>& blocks);

// In Call::step_of: the whole call is an average.
inline constexpr std::uint8_t kStepOfAverage = 0x80;

// Buffers are borrowed until the work completes. Who needs which (P ranks):
//   all_reduce, reduce   outputs[0], in place (reduce: the result is the root's; the others' buffers stay as
//   they are) broadcast            outputs[0] all_gather           inputs[0], outputs[P]        gather
//   inputs[0], outputs[P] at the root reduce_scatter       inputs[P], outputs[0]        scatter  inputs[P] at
//   the root, outputs[0] all_to_all           inputs[P], outputs[P]        barrier  none
//   send                 inputs[0], to `root`            receive  outputs[0], from `root` or kAnySource
// all_reduce may have inputs[0] too, written as well: the residual of the i8 wire format (quantised.hpp), no output.
// An output may equal an input exactly; partial overlap is not allowed.
struct Call {
  Kind kind = Kind::barrier;
  kernels::DType dtype = kernels::DType::u8;
  kernels::ReduceOp reduce = kernels::ReduceOp::sum;
  bool average = false;  // sum, then divide by the number of ranks (floats)
  kernels::DType wire = kernels::DType::u8;
  AlgorithmId algorithm = AlgorithmId::direct;
  AlgorithmId between = AlgorithmId::local;  // of a hierarchical one: between hosts
  std::uint16_t table = 0;                   // hash of the choice table: all ranks choose alike, or hear of it
  std::uint32_t sequence = 0;
  int root = 0;
  int tag = 0;  // of a send or receive, not negative
  // Of a call that is a part of another one: 1 + that call's kind, with kStepOfAverage; and, where each rank has a
  // block, a digest of their sizes.
  std::uint8_t step_of = 0;
  std::uint64_t layout = 0;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;

  // Whether it runs as integers that share a scale: Quantised.
  bool is_quantised() const {
    return dtype == kernels::DType::f32 && (wire == kernels::DType::i32 || wire == kernels::DType::i8);
  }
  Buffer tensor() const;         // outputs[0], a send's inputs[0], empty for a barrier
  std::size_t elements() const;  // of that
  // What a call that is a part of this one has in `step_of`.
  std::uint8_t step() const;
  // The size that the choice of an algorithm goes by, the same on every rank: the whole tensor that is reduced, sent to
  // all or gathered by all. An exchange's is what this rank gives. 0 where the ranks know different sizes.
  std::size_t choice_bytes() const;
};

// A collective that passed its deadline on the rank that gave up first. Its number and its timeout are the same on
// every rank that waited for the same reason.
struct Expired {
  std::uint32_t call = 0;  // 0: no collective has
  std::int64_t timeout_ns = 0;
  bool operator==(const Expired&) const = default;
};

struct Failure {
  enum class Kind : std::uint8_t {
    none = 0,
    peer_lost = 1,    // a rank died or left
    switch_lost = 2,  // the aggregator went away
    mismatch = 3,     // ranks called different things
    timeout = 4,      // a deadline passed
    aborted = 5,      // this rank ended the group
    system = 6,       // the operating system refused
  };
  Kind kind = Kind::none;
  int rank = -1;  // the rank at fault, where known
  std::string text;
  // What another rank said, where this came from it: passed on as it was said, not wrapped once a rank.
  std::string remote_reason;
  // This rank only left: that harms nobody who does not wait for it.
  bool orderly = false;
  // Of a mismatch: the call that the other rank was in.
  std::uint32_t their_call = 0;
  // The collective whose deadline caused this failure, on this rank or on a rank that reported it.
  Expired expired = {};
  explicit operator bool() const { return kind != Kind::none; }
};

}  // namespace netfold::collective
