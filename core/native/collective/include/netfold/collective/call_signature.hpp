// The facts of a call, beside its size, on which ranks agree before the switch adds a value: 16 bits of every packet.
//
// A switch compares these bits and does not read them. On the wire they are combined (exclusive or) with the hash of
// the choice table, which is the same on every rank of a group. So two calls with different signatures always differ in
// the packet, and a rank can report what another rank called.
#pragma once

#include <netfold/collective/call.hpp>

#include <optional>
#include <string>

namespace netfold::collective {

// The numeric values travel in packets: append only. A step is one of several calls that an all_reduce is made of.
enum class CallForm : std::uint8_t {
  all_reduce = 0,
  all_reduce_avg = 1,
  reduce = 2,
  reduce_avg = 3,
  reduce_scatter = 4,
  reduce_scatter_avg = 5,
  broadcast = 6,
  all_gather = 7,
  barrier = 8,
  step = 9,
  step_avg = 10,
};
inline constexpr std::uint8_t kCallFormCount = 11;

struct CallSignature {
  CallForm form = CallForm::barrier;
  Element element = element_of(kernels::DType::u8);  // of the tensor; a barrier's is u8
  std::uint8_t root = 0;                             // 0 where the form has no root

  // The forms with a root, in this order: reduce, reduce_avg, broadcast.
  static constexpr int kRootedForms = 3;

  // Of a call that goes through a switch.
  static CallSignature of(const Call& call);
  // From bits that another rank sent; nullopt where no call has these bits: that rank's choice table differs.
  static std::optional<CallSignature> unpacked(std::uint16_t bits);
  // Bits 0 to 4 the element. Bits 5 to 15: of a form with a root 256 * its number among those + the root; of another form
  // 256 * kRootedForms + the form.
  std::uint16_t packed() const;

  // Whether each rank has a block of its own, so that a packet carries a digest of all sizes instead of one size.
  bool has_blocks() const;
  // "broadcast #12 of 100 f32 (root 2)"; `elements`: a packet's field, `reduce`: its operator.
  std::string text(std::uint32_t operation, std::uint32_t elements, kernels::ReduceOp reduce) const;
};

}  // namespace netfold::collective
