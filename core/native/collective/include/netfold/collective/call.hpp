// A rank's call and its failures: the types that the algorithms and the engine share.
#pragma once

#include <netfold/collective/element.hpp>
#include <netfold/kernels/types.hpp>
#include <netfold/transport/pipe.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
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
// "?" for a value that is no kind.
const char* name(Kind kind);
// Between two ranks, and so not ordered with the group's collectives.
inline bool is_transfer(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

// The numeric values travel in messages and event records: append only.
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
// "?" for a value that is no algorithm.
const char* name(AlgorithmId algorithm);

// A receive's `root` when any rank may be the sender.
inline constexpr int kAnySource = -1;

struct Buffer {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// A digest of the sizes of all blocks, in order. Ranks compare it to find that their sizes differ.
std::uint64_t layout_of(const std::vector<Buffer>& blocks);
// " of several tensors (digest of all sizes: 123)", for the text of a coalesced call.
std::string coalesced_text(std::uint64_t digest);

// In Call::layout: the call is made of several calls, of which each rank passes the same sizes. A size in elements does
// not have this bit.
inline constexpr std::uint64_t kCoalesced = std::uint64_t{1} << 63;

// In Call::step_of: the whole call is an average.
inline constexpr std::uint8_t kStepOfAverage = 0x80;

// Whether a sum is divided. partial: it becomes a partial mean (kernels/reduce.hpp), for a call inside an average.
enum class Averaging : std::uint8_t { none = 0, whole = 1, partial = 2 };

// One call of one rank. The buffers are borrowed until the work completes. Each kind uses (P ranks):
//
//   kind                 inputs                      outputs
//   all_reduce           none, or the i8 residual    [1], in place
//   reduce               none                        [1], in place; only the root's changes
//   broadcast            none                        [1]
//   all_gather           [1]                         [P]
//   gather               [1]                         [P] at the root
//   reduce_scatter       [P]                         [1]
//   scatter              [P] at the root             [1]
//   all_to_all           [P]                         [P]
//   barrier              none                        none
//   send                 [1], to `root`              none
//   receive              none                        [1], from `root` or kAnySource
//
// An all_reduce's input is the residual of the i8 wire format (quantised.cpp); it is written too.
// An output may overlap an input in any way (overlaps.cpp); two outputs must not overlap.
struct Call {
  Kind kind = Kind::barrier;
  kernels::DType dtype = kernels::DType::u8;
  Element carried = {};  // what travels as `dtype`, a value from kFirstCarried on; else none
  kernels::ReduceOp reduce = kernels::ReduceOp::sum;
  Averaging average = Averaging::none;
  kernels::DType wire = kernels::DType::u8;
  AlgorithmId algorithm = AlgorithmId::direct;
  AlgorithmId between = AlgorithmId::local;  // hierarchical: the algorithm between hosts
  std::uint16_t table = 0;                   // hash of the choice table; ranks whose tables differ report a mismatch
  std::uint32_t sequence = 0;
  int root = 0;
  int tag = 0;                 // of a send or receive; not negative, unless the message is internal
  bool accepts_less = false;   // of a receive: the message may be shorter than the output
  bool is_internal = false;    // a message that netfold sends for itself, not an operation of the program
  bool copies_inputs = false;  // the algorithm works on a copy of the inputs, since outputs overlap them
  std::uint8_t step_of = 0;    // of a call inside another call: that call's step(); else 0
  int whole_root = -1;         // of a call inside another call: that call's root
  // A call inside another call has layout_of that call's blocks here, where ranks have blocks. A call made of several
  // has a digest of the sizes of all, with kCoalesced, and so have the calls inside it. Else 0.
  std::uint64_t layout = 0;
  std::span<const std::uint32_t> ranks_in_tensors;  // of an average, by rank; see ranks_in()
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  transport::Pipe::GpuLease gpu;  // of a send or receive: its buffer is in this memory of a GPU; null: the host's

  // Whether the call runs as integers that share a scale: see Quantised.
  bool is_quantised() const {
    return dtype == kernels::DType::f32 && (wire == kernels::DType::i32 || wire == kernels::DType::i8);
  }
  Element element() const { return carried != Element{} ? carried : element_of(dtype); }
  // Sets the dtype to that which carries such elements.
  void set_element(Element of) {
    dtype = carrier(of);
    carried = of != element_of(dtype) ? of : Element{};
  }
  // Of how many ranks the tensor of `rank` is the partial mean: more than 1 where each host has reduced before.
  std::uint32_t ranks_in(int rank) const {
    return ranks_in_tensors.empty() ? 1 : ranks_in_tensors[static_cast<std::size_t>(rank)];
  }
  // outputs[0]; a send's inputs[0]; empty for a barrier.
  Buffer tensor() const;
  // The bytes that the rank at `self` gives to `peer`, which may be itself; null where it gives nothing.
  const Buffer* given_to(int self, int peer) const;
  // The place where the rank at `self` stores bytes from `peer` unchanged; null where it takes nothing, or reduces it.
  const Buffer* taken_from(int self, int peer) const;
  // Elements of tensor().
  std::size_t elements() const;
  // The value of `step_of` in a call that is part of this one: 1 + kind, with kStepOfAverage.
  std::uint8_t step() const;
  // The bytes by which the choice table chooses, the same on every rank: the whole tensor that is reduced, broadcast
  // or gathered by all; of an all_to_all what this rank gives. 0 where the ranks know different sizes.
  std::size_t choice_bytes() const;
};

// A row of a choice table. The rows of one kind ascend by `min_bytes`, and the first has 0.
struct Choice {
  Kind kind = Kind::barrier;
  std::uint64_t min_bytes = 0;  // for operations of at least this size
  AlgorithmId algorithm = AlgorithmId::direct;
  int wire = -1;                             // DType; -1: the tensor's
  AlgorithmId between = AlgorithmId::local;  // of a hierarchical algorithm: between hosts
};
// The table's row for such a call.
Choice choose(const std::vector<Choice>& table, Kind kind, std::uint64_t bytes);
// Whether a switch of the hardware profile (docs/reference/hardware-profile.md) can reduce such a call, whose values
// travel as `wire`. All packets of a call that is quantised to i32 are in the profile too.
bool in_hardware_profile(Kind kind, kernels::DType wire, kernels::ReduceOp reduce);

// A collective that passed its deadline on the rank that gave up first. Both values are the same on every rank that
// waited for the same reason.
struct Expired {
  std::uint32_t call = 0;  // sequence number; 0: no deadline passed
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
  // The reason that another rank reported. It is passed on unchanged, so that it is not wrapped once a rank.
  std::string remote_reason;
  // The rank left in order: only ranks that wait for it fail.
  bool orderly = false;
  // Of a mismatch: the sequence number of the other rank's call.
  std::uint32_t their_call = 0;
  // The collective whose deadline caused this failure, on this rank or on a rank that reported it.
  Expired expired = {};
  explicit operator bool() const { return kind != Kind::none; }
};

}  // namespace netfold::collective
