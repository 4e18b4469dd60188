// The machine of core/native/p4/netfold_tna.p4: one job's slots in a Tofino, as its registers hold them.
//
// Theory of operation. A packet accesses each register once, in the order below. So a slot's chunk moves on before the
// pipeline knows whether the slot's present chunk is complete: there is no drop for `window`. The table's rows are by the
// order of a packet's chunk and the slot's, as numbers of `chunk_bits` bits with a sign.
//
//   chunk   slot                  packet of chunk c               becomes           answer
//   below   any                   any                             unchanged         - (stale)
//   above   any                   any                             collecting c      -
//   alike   any                   disagrees with the first        unchanged         the sender's call, to every worker
//   alike   collecting            known worker                    unchanged         - (duplicate)
//   alike   collecting            new worker, not the last        collecting        -
//   alike   collecting            last worker                     complete          result to every worker
//   alike   complete              any worker                      unchanged         the kept result, to that worker
//
// With a parent, the last worker's packet becomes the sum to the parent, and a slot is complete once it has the parent's
// result as well. A slot moves on although that result is not there.
//
//   chunk   packet of the parent for chunk c              becomes           what leaves
//   below   any                                           unchanged         - (stale)
//   alike   complete                                      unchanged         - (duplicate)
//   others  a mismatch                                    unchanged         the mismatch, to every worker
//   alike   a result, and all workers contributed         complete          result to every worker
//   others  any other                                     unchanged         - (window)
//
// The packet itself leaves, with another flag, worker and number, and with the sums as values: `chunk` stays as
// its sender wrote it. Of the program's operators this machine has the sum of u32, the only one that the search calls.
// Its mismatches and sums have no numbers: nothing reads the former, and the search gives the latter theirs. It is a
// value: copyable, with canonical bytes.
#pragma once

#include <netfold/protocol/switch_job.hpp>

namespace netfold::model_check {

class TofinoJob {
 public:
  using Outcome = protocol::SwitchJob::Outcome;
  using Handled = protocol::SwitchJob::Handled;

  // chunk_bits: that a slot's chunk is compared by; 32 in the program, and fewer in a search, whose chunks are few.
  TofinoJob(const protocol::JobConfig& config, std::uint32_t chunk_bits);

  // Handles one packet of a worker, or of the parent: dropped; stored; completed or mismatch, for every worker;
  // resend_result, for the sender; summed or resend_sum, for the parent; nack. What leaves replaces the packet.
  Handled handle_packet(std::span<std::byte> packet, bool from_parent);

  const protocol::JobConfig& config() const { return config_; }
  // As SwitchJob's.
  std::vector<std::uint16_t> missing(std::uint64_t chunk) const;
  void append_canonical(std::vector<std::byte>& out) const;

 private:
  struct Slot {
    std::int64_t chunk = 0;
    bool has_result = false;    // the parent's
    std::uint32_t workers = 0;  // a bit for each that contributed
    protocol::CallDescriptor call;
    std::uint32_t number = 0;  // of the result
    std::uint16_t last = 0;    // the worker that contributed last, by its name
  };

  protocol::Drop check(const protocol::Header& header, std::size_t bytes) const;
  protocol::Drop check_parent(const protocol::Header& header) const;
  // The registers of the slot, after the checks. opens: the packet is its chunk's first.
  void enter(const protocol::Header& header, bool from_parent, Handled& handled, bool& opens);
  // The low bits of a number, the highest of which is its sign.
  std::int64_t compared(std::uint64_t number) const;
  std::uint32_t all() const { return (std::uint32_t{1} << config_.workers) - 1; }
  std::uint32_t slot_of(std::uint64_t chunk) const;

  protocol::JobConfig config_;
  std::uint32_t chunk_bits_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> sums_;  // [slot][value]
  std::uint32_t results_ = 0;
};

}  // namespace netfold::model_check
