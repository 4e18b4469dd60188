// The switch's half of aggregation: one job's pool of slots.
//
// Theory of operation. A job of N workers has S slots; S is the least power of two that is 2W or more. Chunk c lives in
// slot c mod S. A worker has at most W chunks in flight: it sends chunk c only when it has the results of all chunks up
// to c - W. So the first contribution to chunk c proves that its sender has result c - W, hence that every worker
// contributed c - W, hence that every worker has result c - 2W. The slot's former tenant, c - S, can then be forgotten.
// The full chunk number is compared; a version bit cannot tell apart a packet that was delayed by two rounds of the
// slots (VeriNC, ICNP'26). So under any reordering, duplication and delay, a packet belongs to the slot's present
// chunk, or the switch drops the packet.
//
//   slot state     packet of chunk c (same residue)      becomes            answer
//   collecting     c = slot's, new worker                collecting         -
//   collecting     c = slot's, last worker               complete           result to every worker
//   collecting     c = slot's, known worker              unchanged          - (duplicate)
//   collecting     c = slot's, disagrees with the first  unchanged          mismatch to both sides
//   complete       c = slot's                            unchanged          the kept result, to that worker
//   complete       c = slot's + S                        collecting c       -
//   any            c < slot's                            unchanged          - (stale)
//   any            other                                 unchanged          - (window: the sender broke the rule)
//
// A contribution is added on arrival as far as the sum stays the same for every order of arrival (SumOrder): integers
// always; f32 and f64 once those of all lower workers are there, else the contribution is kept until they are; f16 and
// bf16, which are rounded once, when all are there. The machine is a value: copyable, comparable, with canonical bytes.
// It has no socket, clock or thread, and allocates only when it is made.
//
// A tree of switches. A switch with a parent is a worker of the parent. The contributions of its own workers become a
// sum, which goes up as one contribution to the same chunk; the parent's result is the workers' result.
//
//   collecting     c = slot's, last worker               summed             the sum, to the parent
//   summed         c = slot's, any worker                unchanged          the sum once more, to the parent
//   summed         the parent's result of c              complete           result to every worker
//   collecting     the parent's result of c              unchanged          - (window: it lacks this switch's sum)
//   complete       the parent's result of c              unchanged          - (duplicate)
//   not complete   the parent's mismatch of c            unchanged          the mismatch to every worker
//
// Chunk numbers and the window are the same at every level, so the argument above holds at every level. A leaf sends
// chunk c up only when all of its workers sent c, so the first sum for c at the parent proves that a worker has result
// c - W. No switch has result c - W before all workers of the whole tree contributed c - W. So each of these workers
// has result c - 2W, and neither a worker nor its leaf will ask for c - 2W again. At a leaf, a worker that contributes
// c has result c - W in the same way, and the leaf's own slot is complete, since its workers got result c - 2W from the
// leaf.
//
// A packet that is lost between a switch and its parent is repaired end to end: a worker that lacks a result
// contributes again, and the leaf then sends the sum again. There is no timer here. The parent's packet numbers and
// NACKs make the repair quicker (parent_sender.hpp).
#pragma once

#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/packet.hpp>

#include <array>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

namespace netfold::protocol {

// A switch's identity at its parent, which the parent assigned when the switch joined.
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
  std::uint16_t workers = 0;        // contributors: workers and switches, 1..kMaxWorkers; a tree has more in all
  std::uint32_t window = 0;         // W: chunks that a worker may have in flight
  std::uint32_t payload_bytes = 0;  // of every packet; a multiple of 8, up to kMaxPayloadBytes
  std::optional<ParentLink> parent = std::nullopt;
  // By worker: its number in answers, counted over the whole tree; a switch has the lowest number below it.
  // Empty: the worker's index here.
  std::vector<std::uint16_t> names = {};

  bool operator==(const JobConfig&) const = default;
  // 2W, rounded up to a power of two: a slot is the low bits of a chunk's number.
  std::uint32_t slots() const { return std::bit_ceil(2 * window); }
  // Bytes that a job of this shape takes, which admission grants.
  std::size_t memory_bytes() const;
};

class SwitchJob {
 public:
  // Throws std::invalid_argument that names the broken bound.
  explicit SwitchJob(const JobConfig& config);

  enum class Outcome : std::uint8_t {
    dropped,        // nothing changed; `drop` has the reason
    stored,         // counted; the chunk still misses workers
    completed,      // the result is complete: send frame(slot) to every worker
    resend_result,  // a late duplicate: send frame(slot) to `worker` alone
    mismatch,       // the calls of the sender and `other` differ: send mismatch packets to both
    summed,         // all of this switch's workers contributed: send sum(slot) to the parent
    resend_sum,     // a duplicate before the parent's result: send sum(slot) once more
    nack,           // the parent's: the packets that the header names did not come
  };
  struct Handled {
    Outcome outcome = Outcome::dropped;
    Drop drop = Drop::none;
    std::uint32_t slot = 0;
    std::uint64_t chunk = 0;
    std::uint16_t worker = 0;
    std::uint16_t other = 0;  // mismatch: a worker that agreed on the slot's descriptor
  };

  // Handles one packet of a worker. Never reads past `bytes`, never throws, and changes nothing unless stored, summed
  // or completed.
  Handled handle_packet(std::span<const std::byte> bytes);
  // `header`: parsed from these bytes.
  Handled handle_packet(const Header& header, std::span<const std::byte> bytes);

  // Handles one packet of the parent: dropped, completed, mismatch (of the header's worker, by its name) or nack.
  // Changes nothing unless completed. Precondition: config().parent.
  Handled handle_parent(std::span<const std::byte> bytes);
  Handled handle_parent(const Header& header, std::span<const std::byte> bytes);
  // Returns the contribution to the parent, after `summed` and until the slot has a new tenant.
  // `packet_number`: for its header, used by no packet to the parent before. Precondition: config().parent.
  std::span<const std::byte> sum(std::uint32_t slot, std::uint64_t packet_number);

  // Returns the answer packet of the slot's last completed chunk, whole and final, with its chunk number in the header.
  // The bytes change when a later tenant of the slot completes.
  std::span<const std::byte> frame(std::uint32_t slot) const;
  // After `mismatch`: writes the packet that describes the call of worker `about`, by its name.
  // `number`: the packet number, different for each mismatch and NACK. `out`: packet_bytes() bytes.
  void write_mismatch(std::uint64_t chunk, const CallDescriptor& call, std::uint16_t about, std::uint64_t number,
                      std::byte* out) const;
  // Writes the packet that names worker `to`'s missing packets; `number` and `out` as above.
  // Precondition: gap.count > 0.
  void write_nack(std::uint16_t to, const GapDetector::Gap& gap, std::uint64_t number, std::byte* out) const;
  CallDescriptor descriptor(std::uint32_t slot) const { return slots_[slot].descriptor; }
  std::uint16_t name_of(std::uint16_t worker) const { return config_.names.empty() ? worker : config_.names[worker]; }

  // Returns the workers whose contribution to `chunk` has not come, in ascending order; empty for a chunk that is
  // complete, summed or unknown.
  std::vector<std::uint16_t> missing(std::uint64_t chunk) const;

  // Counts the slots that hold contributions of some workers, not of all. Cost: every slot.
  std::uint32_t collecting_count() const;
  // Counts the slots that wait for the parent's result. Cost: every slot.
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
    std::uint16_t added = 0;  // floats: contributions of the workers below are in the sum so far
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
  // Adds a contribution that is not the slot's last to the sum so far, or keeps it.
  void add_contribution(std::uint32_t slot, std::uint16_t worker, const std::byte* values);
  // Reduces all contributions, of which `values` is the last, into `packet`, behind its header.
  // `in_packet`: updated; bytes of values in the packet, zeros follow.
  void finish(std::uint32_t slot, std::uint16_t worker, const std::byte* values, std::byte* packet,
              std::uint32_t& in_packet);
  // Lists the sum so far, if any, and the kept contributions up to `last` in the order of workers, with `values` for
  // `worker`'s; returns how many.
  std::size_t sources_of(std::uint32_t slot, std::uint16_t worker, const std::byte* values, std::uint16_t last,
                         std::array<const void*, kMaxWorkers>& sources) const;
  static void reduce(const Slot& slot, std::byte* to, std::span<const void* const> sources);
  // Whether contribution(slot, worker) holds values that the sum still needs.
  bool keeps(const Slot& slot, std::uint16_t worker) const;
  static void clear_behind(std::byte* packet, std::uint32_t& values, std::size_t value_bytes);
  // Writes the answer's header before the values.
  void complete(std::uint32_t slot, std::uint16_t last_worker);
  std::byte* frame_at(std::uint32_t slot) { return frames_.data() + slot * packet_bytes(); }
  std::byte* sum_at(std::uint32_t slot) { return sums_.data() + slot * packet_bytes(); }
  // Worker 0's contribution shares its memory with the sum so far.
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
