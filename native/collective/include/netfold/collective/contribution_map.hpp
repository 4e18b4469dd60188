// A call as the switch sees it: one line of elements, to which every rank contributes all, and which all get back.
//
// So one machine does every operation. A segment is a stretch of the line with one source and one target; where this
// rank has nothing to give, it contributes zeros to a bitwise or of integers, which change nothing (P ranks, n bytes):
//
//   all_reduce      one segment: from the tensor, to the tensor
//   reduce          from the tensor; to the tensor at the root alone
//   broadcast       from the tensor at the root alone; to the tensor elsewhere
//   reduce_scatter  a segment a rank: from each input; to the output in this rank's
//   all_gather      a segment a rank: from the input in this rank's; to each other output
//   barrier         one byte, from nowhere to nowhere
//
// Bytes sent by a rank: n, whatever its part of them is. That is what an all_reduce needs; a ring's reduce_scatter and
// all_gather send n(P-1)/P, so what the switch saves there are steps. What only moves values travels as unsigned
// integers of the element's width: all bits arrive as they were, those of a NaN too.
#pragma once

#include <netfold/collective/call.hpp>

namespace netfold::collective {

class ContributionMap {
 public:
  // Of `call` on the rank at `position` of `ranks`. Borrows the call's buffers. An all_gather's own block is copied to
  // its output here, and given from there.
  ContributionMap(const Call& call, int position, int ranks);

  // On the line, in the wire format; 0 where there is nothing to do.
  std::size_t elements() const { return elements_; }
  kernels::DType wire() const { return wire_; }
  kernels::ReduceOp reduce() const { return reduce_; }
  // What stands for the call's size in every packet: the number of the tensor's elements, or, where each rank has a
  // block, a digest of their sizes; the low 32 bits.
  std::uint32_t size_digest() const { return size_digest_; }

  // This rank's contribution to `count` elements from `first` on, in the wire format: where it stands, or `zeros`, or
  // `staging` once it has been put together there. Both have room for `count`.
  const std::byte* contribution(std::size_t first, std::size_t count, std::byte* staging, const std::byte* zeros) const;
  // Writes the line's `values`, in the wire format, to where this rank wants them.
  void deliver(std::size_t first, std::size_t count, const std::byte* values) const;

 private:
  struct Segment {
    std::size_t first;
    std::size_t count;
    const std::byte* from;  // null: zeros
    std::byte* to;          // null: not wanted here
  };
  void add(std::size_t bytes, const std::byte* from, std::byte* to);
  // Calls visit(segment, offset in it, how many, offset in the range) for each segment that the range meets.
  template <class Visit>
  void each(std::size_t first, std::size_t count, const Visit& visit) const;

  kernels::DType dtype_;  // of the tensor, or what stands for it
  kernels::DType wire_;
  kernels::ReduceOp reduce_;
  std::uint32_t size_digest_ = 0;
  std::size_t elements_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace netfold::collective
