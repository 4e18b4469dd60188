// What of one sender's packets did not come, read from their packet numbers: how the switch finds a lost contribution.
//
// Theory of operation. A sender numbers its packets 1, 2, 3, ... in order of sending, retransmissions included, and one
// path rarely reorders. A packet counts as lost when one that was sent kReorderThreshold later is here and it is not.
// The switch says so, to the one worker whose packet it was, in a NACK (SwitchJob::write_nack); that worker sends
// the chunk again under a new packet number, so that a second loss of it is found in the same way. To all other workers a
// lost contribution is a chunk whose answer is late, and they need not guess.
//
// A NACK is a hint. It changes nothing at the switch, and makes a worker send again what it may send again at any
// time: sums do not depend on it, and where it is lost itself the worker's timers stand behind it. A packet number of a
// packet that never left (its socket was full) is noticed too, and means nothing to its sender. State of a sender: 16
// bytes, of which a P4 program may keep the first eight and say at once what it misses.
//
// A value: copyable, comparable, with no clock.
#pragma once

#include <cstdint>

namespace netfold::protocol {

// Later packets of the same sender after which one counts as lost. Small, since one path rarely reorders; more than
// TCP's three, since a batch of one socket call may be processed out of order by several receive queues.
inline constexpr std::uint64_t kReorderThreshold = 8;

class GapDetector {
 public:
  struct Gap {  // packet numbers [first, first + count); among them, at most kReorderThreshold may have come
    std::uint64_t first = 0;
    std::uint32_t count = 0;  // 0: nothing is missing
    bool operator==(const Gap&) const = default;
  };
  // A packet came. What counts as lost from now on; each packet number is named at most once.
  Gap observe(std::uint64_t packet_number);

  bool operator==(const GapDetector&) const = default;

 private:
  std::uint64_t newest_ = 0;
  std::uint64_t seen_ = ~std::uint64_t{0};  // bit i: newest_ - i came; what was before the first packet did
};

}  // namespace netfold::protocol
