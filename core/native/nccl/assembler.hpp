// Events of NCCL in the order of time become records: one for each operation, and one for each of its transfers over the
// network. A value without threads, clocks and files.
//
// NCCL's end of an operation is the end of its submission. The operation itself has ended when the kernel has stopped on
// all of its channels and no event under it is open. Since the proxy of a small send may begin after the kernel, an
// operation is written only kQuietNs later. Ends that never come (NCCL failed, events were dropped) leave the operation
// open until its communicator or the recording ends, or for kMostOpenNs; its record then says that it was cut off.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "event_rings.hpp"

namespace netfold::nccl {

// As in core/src/netfold/profile/nccl.py.
enum class Ending : std::uint8_t {
  kernel,      // by the kernel's channels, and by transfers where there are some
  transfers,   // by transfers only
  submission,  // NCCL reported nothing but the submission
  cut_off,     // something under it had not ended
};

struct OperationRecord {
  std::uint64_t id = 0;
  std::uint64_t count = 0;                           // elements
  std::int64_t called_ns = 0;                        // the call of NCCL; 0: not known
  std::int64_t submitted_ns = 0;                     // to the proxy and the GPU
  std::int64_t launched_ns = 0;                      // the return of the kernel's launch; 0: not known
  std::int64_t began_ns = 0;                         // the first event under it; 0: there was none
  std::int64_t ended_ns = 0;                         // the last event under it; without one, the end of the submission
  std::uint64_t gpu_began_ns = 0, gpu_ended_ns = 0;  // of the GPU's clock; 0: not known
  std::uint64_t sent_bytes = 0, received_bytes = 0;  // over the network, by this process
  std::uint64_t sequence = 0;                        // among the communicator's operations of this function
  std::uint32_t comm = 0;
  std::int32_t peer = -1;  // or root
  std::uint16_t channels = 0;
  std::uint16_t transfers = 0;
  std::uint8_t function = 0, dtype = 0, algorithm = 0, protocol = 0;
  Ending ending = Ending::kernel;
  std::uint8_t reserved[7] = {};
};
static_assert(sizeof(OperationRecord) == 120);

// One proxy operation: what one channel of an operation sends to or receives from one peer.
struct TransferRecord {
  std::uint64_t operation = 0;  // 0: of another process, for which this one sends
  std::int64_t began_ns = 0, ended_ns = 0;
  std::uint64_t bytes = 0;
  std::int64_t gpu_wait_ns = 0;   // its steps waited for the GPU, all together
  std::int64_t peer_wait_ns = 0;  // ... until the peer could take more
  std::int64_t network_ns = 0;    // ... for the network
  std::uint64_t net_bytes = 0;    // of netfold's own network events; 0: another network plugin
  std::int64_t net_ns = 0;        // in which a request of netfold's was under way, all together
  std::uint32_t net_requests = 0;
  std::uint32_t steps = 0;
  std::uint32_t comm = 0;
  std::int32_t peer = -1;
  std::uint16_t channel = 0;
  std::uint8_t is_send = 0;
  std::uint8_t is_cut_off = 0;
  std::uint8_t reserved[4] = {};
};
static_assert(sizeof(TransferRecord) == 96);

class Assembler {
 public:
  static constexpr std::int64_t kQuietNs = 100'000'000;
  static constexpr std::int64_t kMostOpenNs = 600'000'000'000;
  static constexpr std::int64_t kCallKeptNs = 2'000'000'000;  // after a call, in which its operations are submitted
  static constexpr std::size_t kMostOpen = 1 << 17;           // events; one more is refused, and counted

  // Events by time. Those whose start is not known are passed over.
  void add(const Event& event);
  // Writes the operations that have ended at this time. everything: those that have not, too, as cut off.
  void settle(std::int64_t now_ns, bool everything);

  std::vector<OperationRecord> operations;  // which the caller takes
  std::vector<TransferRecord> transfers;
  std::uint64_t refused = 0;
  std::uint64_t unknown = 0;  // stops and states of events whose start is not known

 private:
  struct Open {  // an event that may still get an end, a state or events under it
    std::int32_t type = 0;
    std::uint32_t comm = 0;
    std::uint64_t parent = 0;
    std::int64_t began_ns = 0;
    std::int64_t touched_ns = 0;
    bool has_stopped = false;
  };
  struct Operation {
    OperationRecord record;
    std::int64_t touched_ns = 0;
    std::int64_t stopped_ns = 0;  // of its submission; 0: not yet
    std::uint32_t open = 0;       // events under it
    std::uint32_t kernels = 0;    // that stopped
    std::uint32_t kernels_asked = 0;
    std::uint64_t group = 0;
  };
  struct Transfer {
    TransferRecord record;
  };
  struct Step {
    std::uint64_t transfer = 0;
    std::uint64_t bytes = 0;
    std::int32_t state = 0;
    std::int64_t since_ns = 0;
  };

  void start(const Event& event);
  void stop(const Event& event);
  void state(const Event& event);
  void begin_under(std::uint64_t operation, const Event& event);
  void end_under(std::uint64_t operation, std::int64_t at_ns);
  void leave_state(Step& step, std::int64_t at_ns);
  void write_transfer(std::uint64_t id, std::int64_t at_ns, bool is_cut_off);
  void find_launch(Operation& operation) const;
  bool has_ended(const Operation& operation, std::int64_t now_ns) const;
  void write(Operation& operation);

  std::unordered_map<std::uint64_t, Open> calls_;             // of the API: groups, collectives, messages
  std::unordered_map<std::uint64_t, std::int64_t> launches_;  // of groups: when the kernel was launched
  std::unordered_map<std::uint64_t, Operation> operations_;
  std::unordered_map<std::uint64_t, Transfer> transfers_;
  std::unordered_map<std::uint64_t, Step> steps_;
  std::unordered_map<std::uint64_t, Open> others_;  // kernels' channels, launches, network events
  std::vector<std::uint32_t> ended_comms_;
};

}  // namespace netfold::nccl
