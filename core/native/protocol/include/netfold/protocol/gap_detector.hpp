// Finds the lost packets of one sender by their packet numbers. The switch has one detector per worker.
//
// Theory of operation. A sender numbers its packets 1, 2, 3, ... in the order of sending, retransmissions included, and
// one path rarely reorders. A packet counts as lost once a packet that was sent kReorderThreshold later has come. The
// switch then sends a NACK (SwitchJob::write_nack) to the one worker that sent the lost packet. That worker sends the
// chunk again under a new packet number, so a second loss of the chunk is found in the same way. To the other workers
// the lost contribution only means a late answer, and they need not guess.
//
// A NACK is a hint. It changes nothing at the switch, and makes a worker send what the worker may send again at any
// time. So sums do not depend on NACKs, and the worker's timers repair a lost NACK. The numbers of packets that never
// left, because the sender's socket was full, are named too; the sender ignores them. State per sender: 16 bytes; a P4
// program may keep the first eight and name a gap at once.
//
// A value: copyable, comparable, without a clock.
#pragma once

#include <cstdint>

namespace netfold::protocol {

// A packet counts as lost after so many later packets of its sender. Small, since one path rarely reorders; more than
// TCP's three, since several receive queues may process a batch of one socket call out of order.
inline constexpr std::uint64_t kReorderThreshold = 8;

class GapDetector {
 public:
  struct Gap {  // packet numbers [first, first + count); at most kReorderThreshold of them may have come
    std::uint64_t first = 0;
    std::uint32_t count = 0;  // 0: nothing is missing
    bool operator==(const Gap&) const = default;
  };
  // Records a packet that came; returns the packets that count as lost from now on. Names each number at most once.
  Gap observe(std::uint64_t packet_number);

  bool operator==(const GapDetector&) const = default;

 private:
  std::uint64_t newest_ = 0;
  std::uint64_t received_ =
      ~std::uint64_t{0};  // bit i: newest_ - i came; numbers before the first packet count as come
};

}  // namespace netfold::protocol
