// The part of an operation that one poll does.
//
// One thread polls all groups of a process. A poll that passed over a whole tensor would delay the operations of every
// other group for as long. So a pass keeps its position, and goes on in the next poll. That poll comes at once, since a
// poll that did a slice returns Progress::moved.
#pragma once

#include <netfold/collective/call.hpp>

#include <algorithm>

namespace netfold::collective {

// The most bytes of a call that a poll copies, reduces or converts.
inline constexpr std::size_t kSliceBytes = 512 << 10;
// Less is not worth a system call.
inline constexpr std::size_t kLeastSliceBytes = 64 << 10;

// The slice of each of so many streams that one poll moves.
constexpr std::size_t slice_bytes(std::size_t streams) {
  return std::max(kLeastSliceBytes, kSliceBytes / std::max<std::size_t>(1, streams));
}

// Copies of blocks that stay on their rank, slice by slice.
class BlockCopies {
 public:
  // Both have the same size and may be the same memory.
  void add(const Buffer& to, const Buffer& from);
  // Adds the block that stays on the rank at `self`, in calls that have one.
  void add_own_block(const Call& call, int self);
  // Copies a slice. False: nothing is left to copy.
  bool advance();
  bool done() const { return next_ == copies_.size(); }

 private:
  struct Copy {
    Buffer to;
    const std::byte* from;
  };
  std::vector<Copy> copies_;
  std::size_t next_ = 0;    // of copies_
  std::size_t copied_ = 0;  // bytes of the next
};

}  // namespace netfold::collective
