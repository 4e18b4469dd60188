// The counters of one job at the data plane, as the switch's metrics and `netfold top` read them.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace netfold::dataplane {

struct JobCounters {
  std::uint64_t contributions = 0;    // packets that counted
  std::uint64_t results = 0;          // chunks completed
  std::uint64_t result_bytes = 0;     // of the results' values, without padding
  std::uint64_t results_sent = 0;     // packets
  std::uint64_t results_resent = 0;   // packets that answer late duplicates
  std::uint64_t nacks = 0;            // sent to workers
  std::uint64_t mismatches = 0;       // packets whose call differs from the first worker's, here or at the parent
  std::uint64_t hellos = 0;           // accepted
  std::uint64_t backlog_dropped = 0;  // results not sent because a worker's queue was full; the worker asks again
  std::uint64_t send_errors = 0;      // batches that the operating system or the provider refused
  std::string last_send_error;
  std::uint64_t drops[protocol::kDropCount] = {};  // packets of workers, by reason
  std::uint64_t receive_calls = 0;
  std::uint64_t received_datagrams = 0;
  // By worker. The clock is read once a batch, so packets of one batch count as simultaneous.
  std::vector<std::uint64_t> last_arrivals;   // chunks whose last contribution was this worker's, later than the first
  std::vector<std::uint64_t> arrivals;        // contributions that counted
  std::vector<std::uint64_t> arrival_lag_ns;  // sum over arrivals: time since the chunk's first contribution
  std::uint32_t slots = 0;                    // 0 before `begin`
  std::uint32_t slots_collecting = 0;         // slots that hold contributions of some workers, not of all
  // Of the link to the parent; all 0 without a parent.
  std::uint32_t slots_summed = 0;                         // slots that wait for the parent's result
  std::uint64_t sums_sent = 0;                            // packets
  std::uint64_t sums_resent = 0;                          // among sums_sent: sums that were sent before
  std::uint64_t parent_nacks = 0;                         // received
  std::uint64_t parent_drops[protocol::kDropCount] = {};  // packets of the parent, by reason
};

}  // namespace netfold::dataplane
