// A call as the switch sees it: one sequence of elements to which every rank contributes all elements, and which all
// ranks get back.
//
// So one protocol machine runs every operation. A segment is a stretch of the sequence with one source and one target.
// Where a rank has nothing to give, it contributes zeros to a bitwise or of integers, which change nothing (P ranks, n
// bytes):
//
//   all_reduce      one segment: from the tensor, to the tensor
//   reduce          from the tensor; to the tensor at the root alone
//   broadcast       from the tensor at the root alone; to the tensor elsewhere
//   reduce_scatter  a segment for each rank: from each input; this rank's goes to the output
//   all_gather      a segment for each rank: from the input in this rank's; to each other output
//   barrier         one byte, without source and target
//
// A rank sends n bytes, however few of them it contributes. An all_reduce needs that; a ring's reduce_scatter and
// all_gather send n(P-1)/P, so a switch saves only steps there. Calls that only move values use unsigned integers of
// the element's width: all bits arrive unchanged, those of a NaN too.
#pragma once

#include <netfold/collective/reduction.hpp>

namespace netfold::collective {

class ContributionMap {
 public:
  // In size_digest() of several calls in one: it is a digest of their sizes. Only a tensor of 2^31 elements
  // has this bit too, and only an error's text would then name the size wrongly.
  static constexpr std::uint32_t kCoalescedDigest = std::uint32_t{1} << 31;

  // Of `call` on this rank of `team`. Borrows the call. The constructor copies an all_gather's own block to its
  // output, and contributes it from there.
  ContributionMap(const Call& call, const Team& team);

  // Of the sequence, in the wire format; 0 where there is nothing to do.
  std::size_t elements() const { return elements_; }
  kernels::DType wire() const { return wire_; }
  kernels::ReduceOp reduce() const { return reduce_; }
  // The call's size in every packet: the number of the tensor's elements or, where each rank has a block, a digest of
  // the block sizes, with kCoalescedDigest a digest of the sizes of several calls; 32 bits.
  std::uint32_t size_digest() const { return size_digest_; }

  // This rank's contribution to `count` elements from `first` on, in the wire format. Points into the tensor, or to
  // `zeros`, or to `staging`, where the contribution is assembled. Both have space for `count` elements.
  const std::byte* contribution(std::size_t first, std::size_t count, std::byte* staging, const std::byte* zeros) const;
  // Writes `values` of the sequence, in the wire format, to this rank's targets.
  void deliver(std::size_t first, std::size_t count, const std::byte* values) const;

 private:
  struct Segment {
    std::size_t first;
    std::size_t count;
    const std::byte* from;  // null: zeros
    std::byte* to;          // null: this rank does not need them
  };
  void put(std::byte* to, const std::byte* from, std::size_t count) const;
  void add(std::size_t bytes, const std::byte* from, std::byte* to);
  // Calls visit(segment, offset in the segment, count, offset in the range) for each segment in the range.
  template <class Visit>
  void each(std::size_t first, std::size_t count, const Visit& visit) const;

  kernels::DType dtype_;  // of the tensor; in calls that only move, unsigned integers
  kernels::DType wire_;
  kernels::ReduceOp reduce_;
  Reduction reduction_;
  int position_;
  bool scales_;  // contributions differ from the tensor's values
  std::uint32_t size_digest_ = 0;
  std::size_t elements_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace netfold::collective
