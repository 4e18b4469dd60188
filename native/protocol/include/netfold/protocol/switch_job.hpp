// The switch's half of aggregation: one job's pool of slots.
//
// Theory of operation. A job of N workers has S slots, the least power of two that is 2W or more; chunk c lives in slot
// c mod S, and a worker has at most W chunks in flight: it sends chunk c only when it has the results of every chunk up
// to c - W. So the first contribution to chunk c proves that its sender has result c - W, hence that every worker
// contributed c - W, hence that every worker has result c - 2W: the slot's former tenant, c - S, can be forgotten. The
// full chunk number is compared (a version bit cannot tell a packet that was delayed by two turns; VeriNC, ICNP'26), so
// whatever the network does with order, copies and delays, a packet is for the slot's present chunk, or it is dropped.
//
//   slot state     packet of chunk c (same residue)      becomes            answer
//   collecting     c = slot's, new worker                collecting         -
//   collecting     c = slot's, last worker               complete           result to every worker
//   collecting     c = slot's, known worker              unchanged          - (duplicate)
//   collecting     c = slot's, disagrees with the first  unchanged          mismatch to both sides
//   complete       c = slot's                            unchanged          the kept result, to that worker
//   complete       c = slot's + S                        collecting c       -
//   any            c < slot's                            unchanged          - (stale)
//   any            other                                 unchanged          - (window: the sender broke the
//   rule)
//
// A contribution is added where it came in, as far as that leaves the sum the same for every order of arrival:
// integers always, f32 and f64 when those of all lower workers are there, else it is kept until they are; f16 and bf16,
// which are rounded once, when all are. The machine is a value: copyable, comparable, with canonical
// bytes. It has no socket, clock or thread, and allocates only when it is made.
//
// A tree of switches. A switch that has a parent is a worker of it: what its own workers contributed becomes a sum,
// which goes up as one contribution to the same chunk, and the parent's result is its workers' result.
//
//   collecting     c = slot's, last worker               summed             the sum, to the parent
//   summed         c = slot's, any worker                unchanged          the sum once more, to the parent
//   summed         the parent's result of c              complete           result to every worker
//   collecting     the parent's result of c              unchanged          - (window: it lacks this switch's sum)
//   complete       the parent's result of c              unchanged          - (duplicate)
//   not complete   the parent's mismatch of c            unchanged          the mismatch to every worker
//
// Line, window and chunk numbers are the same at every level, so a slot may be taken at every level: a leaf sends chunk
// c up only when all of its workers sent c, so the first sum for c at the parent proves that a worker has result c - W.
// No switch has that before all workers of the whole tree contributed c - W; so each of these has result c - 2W, and
// neither it nor the leaf that it would ask will ask for that again. At a leaf, a worker that contributes c has result
// c - W in the same way; and the leaf's own slot is complete, since its workers got result c - 2W from it.
//
// What is lost between a switch and its parent is repaired end to end: a worker that misses a result contributes again,
// and that sends the sum again. There is no timer here. Numbers and NACKs of the parent make it quicker (parent_sender.hpp).
#pragma once

#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/packet.hpp>

#include <array>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

namespace netfold::protocol {

// What the parent gave this switch when it joined there.
struct ParentLink {
  std::uint32_t job = 0;
  std::uint32_t epoch = 0;
  std::uint32_t incarnation = 0;
  std::uint16_t worker = 0;

  bool operator==(const ParentLink&) const = default;
};

struct JobConfig {
  std::uint32_t job = 0;
  std::uint32_t epoch = 0;
  std::uint32_t incarnation = 0;
  std::uint16_t workers = 0;        // 1..kMaxWorkers
  std::uint32_t window = 0;         // W: chunks a worker may have in flight
  std::uint32_t payload_bytes = 0;  // of every packet; a multiple of 8, up to kMaxPayloadBytes
  std::optional<ParentLink> parent = std::nullopt;
  // By worker: its number among the workers of the whole tree, of a switch the lowest below it; what answers call it.
  // Empty: as it is called here.
  std::vector<std::uint16_t> names = {};

  bool operator==(const JobConfig&) const = default;
  // 2W, or the next power of two: a slot is then the low bits of a chunk's number.
  std::uint32_t slots() const { return std::bit_ceil(2 * window); }
  // Bytes a job of this shape takes: what admission grants.
  std::size_t memory_bytes() const;
};

class SwitchJob {
 public:
  // Throws std::invalid_argument, saying which bound was broken.
  explicit SwitchJob(const JobConfig& config);

  enum class Outcome : std::uint8_t {
    dropped,        // nothing changed; `drop` says why
    stored,         // counted; the chunk still misses workers
    completed,      // the result is there: send frame(slot) to every worker
    resend_result,  // a late duplicate: send frame(slot) to `worker` alone
    mismatch,       // the sender and `other` do not agree; send mismatch packets to both
    summed,         // the last of this switch's own workers: send sum(slot) to the parent
    resend_sum,     // a duplicate while the parent's result is not there: send sum(slot) once more
    nack,           // from the parent: packets to it did not come, as the header says
  };
  struct Handled {
    Outcome outcome = Outcome::dropped;
    Drop drop = Drop::none;
    std::uint32_t slot = 0;
    std::uint64_t chunk = 0;
    std::uint16_t worker = 0;
    std::uint16_t other = 0;  // mismatch: the worker that set the slot's descriptor
  };

  // One datagram in. Never reads past `bytes`, never throws, and changes nothing unless stored or completed.
  Handled handle_packet(std::span<const std::byte> bytes);
  // `header`: of these very bytes, where it was parsed already.
  Handled handle_packet(const Header& header, std::span<const std::byte> bytes);

  // One datagram from the parent: dropped, completed, mismatch (of the header's worker, by its name) or NACK.
  // Changes nothing unless completed. Precondition: config().parent.
  Handled handle_parent(std::span<const std::byte> bytes);
  Handled handle_parent(const Header& header, std::span<const std::byte> bytes);
  // The contribution to the parent, after `summed` and until the slot has a new tenant, with `packet_number` in its header:
  // a number that no packet to the parent had before. Precondition: config().parent.
  std::span<const std::byte> sum(std::uint32_t slot, std::uint64_t packet_number);

  // The answer packet of the slot's last completed chunk, ready to send: whole and final, with its chunk
  // number on it. The bytes change when a later tenant of the slot completes.
  std::span<const std::byte> frame(std::uint32_t slot) const;
  // After `mismatch`: the packet that tells what `about`, by its name, said. `number`: another one for each mismatch
  // and NACK that is written. `out` has config().payload_bytes + kHeaderBytes.
  void write_mismatch(std::uint64_t chunk, const CallDescriptor& said, std::uint16_t about, std::uint64_t number,
                      std::byte* out) const;
  // The packet that tells `to` which of its packets did not come; `number` and `out` as above. Precondition:
  // gap.count > 0.
  void write_nack(std::uint16_t to, const GapDetector::Gap& gap, std::uint64_t number, std::byte* out) const;
  CallDescriptor descriptor(std::uint32_t slot) const { return slots_[slot].descriptor; }
  std::uint16_t name_of(std::uint16_t worker) const { return config_.names.empty() ? worker : config_.names[worker]; }

  // Workers whose contribution to `chunk` has not come (bit index order); empty when it is complete, summed or
  // unknown.
  std::vector<std::uint16_t> missing(std::uint64_t chunk) const;

  // Slots that hold contributions of some workers and wait for the others. Looks at every slot.
  std::uint32_t collecting_count() const;
  // Slots whose sum is at the parent, or on its way there. Looks at every slot.
  std::uint32_t summed_count() const;

  const JobConfig& config() const { return config_; }
  std::size_t packet_bytes() const { return kHeaderBytes + config_.payload_bytes; }
  std::uint32_t slot_count() const { return config_.slots(); }
  bool operator==(const SwitchJob&) const = default;
  // Appends bytes that are equal exactly when the machines are.
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  using Bitmap = std::array<std::uint64_t, kMaxWorkers / 64>;
  struct Slot {
    std::uint64_t chunk = 0;
    CallDescriptor descriptor;
    std::uint16_t contributed_count = 0;
    std::uint16_t folded = 0;  // of floats: the first so many workers' values are in the sum so far
    bool complete = false;
    Bitmap contributed{};
    bool operator==(const Slot&) const = default;
  };

  Drop check(const Header& header, std::size_t bytes) const;
  Drop check_parent(const Header& header, std::size_t bytes) const;
  bool summed(const Slot& slot) const { return !slot.complete && slot.contributed_count == config_.workers; }
  bool has_contributed(const Slot& slot, std::uint16_t worker) const {
    return worker < config_.workers && (slot.contributed[worker / 64] >> (worker % 64) & 1) != 0;
  }
  std::uint32_t slot_of(std::uint64_t chunk) const { return static_cast<std::uint32_t>(chunk) & (slot_count() - 1); }
  // One of the slot's values that is not the last: added to the sum so far, or kept.
  void take(std::uint32_t slot, std::uint16_t worker, const std::byte* values);
  // The last one: all contributions into `packet`, behind where its header goes.
  // `in_packet`: of the packet, bytes that are not zero; kept true.
  void finish(std::uint32_t slot, std::uint16_t worker, const std::byte* values, std::byte* packet,
              std::uint32_t& in_packet);
  // In the order of workers: the sum so far, if any, and what is kept up to `last`, `worker`'s from `values`; how many.
  std::size_t sources_of(std::uint32_t slot, std::uint16_t worker, const std::byte* values, std::uint16_t last,
                         std::array<const void*, kMaxWorkers>& sources) const;
  static void reduce(const Slot& slot, std::byte* to, std::span<const void* const> sources);
  // Whether contribution(slot, worker) holds what a sum will need.
  bool keeps(const Slot& slot, std::uint16_t worker) const;
  static void clear_behind(std::byte* packet, std::uint32_t& values, std::size_t value_bytes);
  // The answer's header, over values that are there.
  void complete(std::uint32_t slot, std::uint16_t last_worker);
  std::byte* frame_at(std::uint32_t slot) { return frames_.data() + slot * packet_bytes(); }
  std::byte* sum_at(std::uint32_t slot) { return sums_.data() + slot * packet_bytes(); }
  // Worker 0's is where the sum so far stands, too.
  const std::byte* contribution(std::uint32_t slot, std::uint16_t worker) const;
  std::byte* contribution(std::uint32_t slot, std::uint16_t worker) {
    return const_cast<std::byte*>(std::as_const(*this).contribution(slot, worker));
  }

  JobConfig config_;
  std::vector<Slot> slots_;
  std::vector<std::byte> contributions_;        // [worker][slot][payload]: the sums so far lie together
  std::vector<std::byte> frames_;               // [slot][header + payload]
  std::vector<std::uint32_t> values_in_frame_;  // bytes of each frame; zeros follow
  std::vector<std::byte> sums_;                 // [slot][header + payload]; only where there is a parent
  std::vector<std::uint32_t> values_in_sum_;
  std::uint64_t packet_number_ = 0;
};

}  // namespace netfold::protocol
