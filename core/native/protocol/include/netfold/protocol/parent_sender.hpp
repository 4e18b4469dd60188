// A leaf switch's packets to its parent: which sums go next, under which packet numbers, and which are sent again.
//
// Theory of operation. The switch offers a sum here when its slot is summed, and once more for each request of a
// worker. Unlike a worker's machine this one has no window, since its workers have windows and its slots are bounded.
// It has no timer, since the workers' timers cover the whole path to the root and back. It only makes repairs quicker,
// as a worker does (worker.hpp). The parent's NACK names packets of this switch that did not come: their sums go again.
// The parent numbers its results in the order in which chunks became complete, so as many results were lost as numbers
// are missing. Most likely these were the results of the sums that were sent longest ago and passed over by results of
// later sums. These sums go again, and the parent answers them at once. A wrong guess costs one packet.
//
//   slot       event                                                      becomes    action
//   (none)     offered: the slot was summed                               due        -
//   due        poll_send                                                  in flight  send
//   in flight  offered: a worker asks again                               due        -
//   in flight  a NACK of the sum's last packet                            due        -
//   in flight  passed over, among the oldest, while numbers are skipped   due        -
//   any        its result                                                 (none)     -
//
// Every packet has a new number, retransmissions included; the number of a packet that the socket refused is not used
// again. The machine stands beside SwitchJob and not in it, as GapDetector does: sums do not depend on it.
//
// A value: copyable, comparable, with canonical bytes and no clock; allocates only when it is made.
#pragma once

#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/index_list.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace netfold::protocol {

class ParentSender {
 public:
  explicit ParentSender(std::uint32_t slot_count) : entries_(slot_count) {}

  // Queues the slot's sum behind the sums that are due; no effect where the sum is due already.
  void offer(std::uint32_t slot);

  // Returns the next sum to send, as SwitchJob::sum(slot, packet_number). Call until empty.
  struct Send {
    std::uint32_t slot = 0;
    std::uint64_t packet_number = 0;
  };
  std::optional<Send> poll_send();
  // The socket refused the slot's packet: the sum is due again.
  void not_sent(std::uint32_t slot);

  // The parent's result for the slot came; `number` is the result's packet number.
  void handle_result(std::uint32_t slot, std::uint64_t number);
  // The parent misses the packets [first, first + count); returns how many sums go again. Sums that were answered or
  // sent again since then do not.
  std::uint32_t handle_nack(std::uint64_t first, std::uint64_t count);

  std::uint32_t in_flight() const { return flight_.count; }
  std::uint64_t packets_sent() const { return packets_sent_; }
  // Of packets_sent(): retransmissions.
  std::uint64_t sent_again() const { return sent_again_; }

  bool operator==(const ParentSender&) const = default;
  // Appends bytes that are equal exactly when the machines are, for machines of equal size to which the same results
  // came.
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  static constexpr std::uint32_t kNone = IndexList::kNone;
  enum class State : std::uint8_t { none, due, flight };
  struct Entry {  // of a slot
    State state = State::none;
    bool sent = false;
    bool again = false;
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
    std::uint64_t send_number = 0;
    bool operator==(const Entry&) const = default;
  };

  void make_due(std::uint32_t slot);

  std::vector<Entry> entries_;
  IndexList due_;
  IndexList flight_;  // in the order of sending
  GapDetector result_gaps_;
  std::uint64_t packet_number_ = 0;
  std::uint64_t highest_received_send_ = 0;  // among sums that were sent once
  std::uint64_t packets_sent_ = 0;
  std::uint64_t sent_again_ = 0;
};

}  // namespace netfold::protocol
