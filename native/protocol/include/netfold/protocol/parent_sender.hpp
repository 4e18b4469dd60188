// A switch's packets to its parent: which sums go next, under which numbers, and which go once more.
//
// Theory of operation. A switch offers a sum here when its slot is summed, and once more for each time that a worker
// asks. It is not a worker's machine: it has no window, since its workers have one and its slots are bounded; and no
// timer, since theirs run over the whole way to the root and back. What is here only makes repairs quicker, as a worker
// does it (worker.hpp). The parent's NACK names packets of ours that did not come: what they carried goes again. The
// parent numbers its results in the order in which chunks became complete: as many as are missing in what came of these
// numbers, so many results were lost, most likely those of the sums that were sent longest ago and passed over by
// results of later ones; these go again, and the parent answers them at once. A wrong guess costs a packet.
//
//   slot       event                                                   becomes    action
//   (none)     offered: it was summed                                  due        -
//   due        poll_send                                               in flight  send
//   in flight  offered: a worker asks again                            due        -
//   in flight  a NACK of the packet that it was sent in              due        -
//   in flight  passed over, among the oldest, as numbers are skipped   due        -
//   any        its result                                              (none)     -
//
// Every packet has a new number, those that are sent again too; a number whose packet the socket refused is not used
// again. Beside SwitchJob and not in it, as GapDetector are: sums do not depend on what is here.
//
// A value: copyable, comparable, with canonical bytes and no clock; allocates only when it is made.
#pragma once

#include <netfold/protocol/gap_detector.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace netfold::protocol {

class ParentSender {
 public:
  explicit ParentSender(std::uint32_t slot_count) : entries_(slot_count) {}

  // The slot's sum goes next, after those that were offered before. Nothing where it is due already.
  void offer(std::uint32_t slot);

  // What goes out now, if anything: SwitchJob::sum(slot, packet_number). Call until empty.
  struct Send {
    std::uint32_t slot = 0;
    std::uint64_t packet_number = 0;
  };
  std::optional<Send> poll_send();
  // The socket did not take it after all; it will be offered again.
  void not_sent(std::uint32_t slot);

  // The parent's result for the slot, `number` in its order, came.
  void handle_result(std::uint32_t slot, std::uint64_t number);
  // The parent misses our packets [first, first + count): how many sums go again. None were named where they were
  // answered, or sent again, since.
  std::uint32_t handle_nack(std::uint64_t first, std::uint64_t count);

  std::uint32_t in_flight() const { return flight_.count; }
  std::uint64_t packets_sent() const { return packets_sent_; }
  // Among them, sums that had been sent before.
  std::uint64_t sent_again() const { return sent_again_; }

  bool operator==(const ParentSender&) const = default;
  // Appends bytes that are equal exactly when the machines are, of as many slots, and the same results came.
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
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
  struct List {  // intrusive; `flight_` is in order of sending
    std::uint32_t head = kNone;
    std::uint32_t tail = kNone;
    std::uint32_t count = 0;
    bool operator==(const List&) const = default;
  };

  void push_back(List& list, std::uint32_t slot);
  void unlink(List& list, std::uint32_t slot);
  void make_due(std::uint32_t slot);

  std::vector<Entry> entries_;
  List due_;
  List flight_;
  GapDetector result_gaps_;
  std::uint64_t packet_number_ = 0;
  std::uint64_t highest_received_send_ = 0;  // of sums that were sent once
  std::uint64_t packets_sent_ = 0;
  std::uint64_t sent_again_ = 0;
};

}  // namespace netfold::protocol
