// What states are made of. Every machine state, packet and network is kept once and has a number; a state of the search
// is a few numbers. What a packet makes of a machine depends on these two alone, so it is found out once and kept.
#pragma once

#include <netfold/model_check/search.hpp>
#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/parent_sender.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/protocol/worker.hpp>

#include <array>
#include <deque>
#include <functional>
#include <unordered_map>

namespace netfold::model_check {

using Id = std::uint32_t;
inline constexpr Id kNoId = 0xffffffff;
// Packets of one sender, where they are numbered.
inline constexpr std::uint64_t kMaxNumbers = 64;

// Which generation of the job. A switch that restarts begins its epochs anew.
struct Generation {
  std::uint32_t incarnation = 1;
  std::uint32_t epoch = 1;
  bool operator==(const Generation&) const = default;
};

// On its way from a worker, or a leaf, to its switch, or back. Its packet number is zero, unless the scope has numbers.
struct Packet {
  bool from_switch = false;
  bool nack = false;
  bool leaf = false;         // between a leaf and the root
  std::uint16_t worker = 0;  // which worker, or leaf, of all
  std::uint64_t chunk = 0;   // of a NACK: the first packet that it names
  Generation generation;
  bool foreign = false;  // of another job
  std::vector<std::byte> bytes;
};

// One sender's packets and their results, in a scope with numbers.
struct SentNumbers {
  std::array<std::uint64_t, kMaxChunks> sent{};  // by chunk: the packet that it was sent in last
  std::uint64_t newest = 0;                      // packet
  std::uint64_t answered = 0;                    // the latest packet whose chunk has its result
  std::uint64_t results = 0;                     // numbers of results that came, a bit each
  std::uint64_t received = 0;                    // chunks that have their result, a bit each
  bool skipped = false;                          // a result came before one of a lower number, which may be lost
  void take_result(std::uint64_t chunk, std::uint64_t number);
  void append_canonical(std::string& out) const;
};

struct SwitchState {
  protocol::SwitchJob machine;
  std::uint32_t restarts = 0;                      // so far; a leaf's: 0
  std::uint16_t leaf = kRoot;                      // which one
  std::array<Generation, kMaxLeaves> leaves = {};  // the root's: what each leaf's generation is while this one's is
  std::vector<protocol::GapDetector> gap_detectors = {};  // by worker, or leaf
  std::vector<std::uint64_t> came = {};  // packets of each, a bit each: what its GapDetector are determined by
  protocol::ParentSender sender{0};      // a leaf's
  SentNumbers numbers = {};              // of its packets to the root
  std::uint32_t asked = 0;               // for sums once more
  static constexpr std::uint16_t kRoot = 0xffff;
  Generation generation() const { return {machine.config().incarnation, machine.config().epoch}; }
  // Of the root, which no two lives of a tree have in common.
  Generation root_generation() const {
    const auto& parent = machine.config().parent;
    return parent ? Generation{parent->incarnation, parent->epoch} : generation();
  }
};

// A worker's machine, and what its clock says.
struct TimedWorker {
  protocol::Worker machine;
  std::int64_t now_ns = 0;
};

struct WorkerState {
  TimedWorker now;
  std::uint16_t number = 0;        // of all; its machine knows the one that it has at its switch
  std::uint32_t called = 0;        // operations
  std::uint64_t sent = 0;          // chunks, a bit each
  std::uint64_t received = 0;      // chunks, a bit each
  bool ended = false;              // by a mismatch
  Generation root_generation;      // of the root, when it joined; without leaves as its own
  std::vector<TimedWorker> later;  // what timers may have made of it
  std::vector<Id> again;           // the packets that its timers send once more, in this order
  SentNumbers numbers;
  std::uint32_t timeouts = 0;  // timers so far, where the scope has numbers
  Generation generation() const { return {now.machine.config().incarnation, now.machine.config().epoch}; }
};

// What an event makes of a machine.
struct Step {
  Id next = kNoId;
  std::vector<Id> sent;  // packets
  std::string became;
  std::string broken;  // a promise, or empty; then there is no next
};

class StateTable {
 public:
  // Throws std::invalid_argument for a scope without sense or beyond a bound.
  explicit StateTable(const Scope& scope);

  Id new_switch(Generation generation, std::uint32_t restarts, const std::array<Generation, kMaxLeaves>& leaves = {});
  // As the root of that number says that it is.
  Id new_leaf(Id root, std::uint16_t leaf);
  // Which leaf the worker is below.
  std::uint16_t leaf_of(std::uint16_t worker) const { return homes_[worker]; }
  // At the switch, or leaf, of that number.
  Id new_worker(Id machine, std::uint16_t worker);
  // What the wire carries from the start.
  std::vector<Id> foreign_packets();
  bool can_call(Id worker) const;
  bool ended(Id worker) const { return workers_[worker].ended; }
  // Or has ended.
  bool finished(Id worker) const;

  // Both stay good.
  const Step& at_switch(Id machine, Id packet);
  const Step& at_worker(Id machine, Id packet);
  // The worker's script calls its next operation. Precondition: can_call.
  Step call(Id worker);
  // It hears that another one has ended.
  Step hear(Id worker);
  // The worker's timer rings, in a scope with numbers. Precondition: can_ring.
  Step timeout(Id worker);
  bool can_time_out(Id worker) const;
  // In a scope with numbers: the promise that breaks when timers alone bring these machines to the end, after all
  // packets in the network were lost.
  std::string broken_alone(Id machine, std::vector<Id> leaves, const std::vector<Id>& workers);

  const SwitchState& switch_state(Id id) const { return switches_[id]; }
  const WorkerState& worker_state(Id id) const { return workers_[id]; }
  const Packet& packet(Id id) const { return packets_[id]; }

  // A network's packets, by number.
  const std::vector<Id>& network(Id id) const { return networks_[id]; }
  Id network_of(std::vector<Id> packets);
  Id with(Id network, const std::vector<Id>& sent);
  Id without(Id network, Id packet);

  std::size_t switch_count() const { return switches_.size(); }
  std::size_t worker_count() const { return workers_.size(); }
  std::size_t packet_count() const { return packets_.size(); }

 private:
  using Key = std::string;
  using Allowed = std::function<bool(std::uint64_t)>;
  using Table = std::deque<std::vector<Id>>;  // steps, by machine and packet

  Id switch_id(SwitchState state);
  Id worker_id(WorkerState state, Step& step);
  Id packet_id(Packet packet);
  Key key_of(const WorkerState& worker) const;

  Step switch_step(Id machine, Id packet);
  // A packet reaches the switch: what becomes of both.
  void take_at_switch(SwitchState& state, const Packet& packet, Step& step);
  void take_at_worker(WorkerState& state, const Packet& packet, Step& step);
  void call(WorkerState& state, Step& step);
  void timeout(WorkerState& state, Step& step);
  // Gap detection at the switch; a NACK, where there is one to write.
  void note_number(SwitchState& state, const protocol::Header& header, Step& step);
  // All that the leaf's sender sends now; `allowed`: whether a sum may be sent again, by its last packet's number.
  void send_sums(SwitchState& state, const Allowed& allowed, Step& step);
  // To a worker, or leaf, by its number there; without its bytes.
  Packet answer_to(const SwitchState& from, std::uint16_t worker) const;
  Step worker_step(Id machine, Id packet);
  // The packet reaches the worker; true when nothing was broken.
  bool receive(WorkerState& worker, const Packet& packet, Step& step) const;
  bool take(WorkerState& worker, const protocol::Worker::Received& received, Step& step) const;
  bool end(WorkerState& worker, const protocol::Header& said, Step& step) const;
  // All that the worker sends now; `allowed`: whether a chunk may be sent again, by its last packet's number.
  bool send(WorkerState& worker, Step& step, const Allowed& allowed = {});
  bool number(WorkerState& worker, std::uint64_t chunk, std::uint64_t packet_number, bool again, const Allowed& allowed,
              Step& step) const;
  // What a result, or a NACK, allows.
  Allowed allowed_by(const Packet& packet, const SentNumbers& numbers, bool rang) const;
  // Whether every chunk that the NACK names, and that has no result, was sent again.
  bool heeded(const Packet& nack, const SentNumbers& before, const SentNumbers& after) const;

  using Script = std::vector<std::uint32_t>;  // chunks of each operation
  const Script& script_of(std::uint16_t worker) const;
  // Which operation of a line a chunk is of; their number where it is beyond.
  static std::uint32_t operation_at(const Script& line, std::uint64_t chunk);
  // Whether all workers call the same there.
  bool agreed(std::uint64_t chunk) const;
  // Chunk by its place on a line of operations, or chunk_count_.
  std::uint64_t place(const Script& line, std::uint32_t operation, std::uint64_t first) const;
  std::int64_t contribution(Generation generation, std::uint16_t worker, std::uint64_t chunk) const;
  std::int64_t result(Generation generation, std::uint64_t chunk) const;
  std::uint16_t first_below(std::uint16_t leaf) const;
  // Its number at its switch.
  std::uint16_t place_of(std::uint16_t worker) const;
  // Another job's packet, which says what the worker, or a leaf, would at that chunk.
  Packet foreign_packet(std::uint16_t worker, std::uint64_t chunk, bool from_switch) const;
  // What a sum is made of.
  std::string taken_apart(std::int64_t sum) const;

  Scope scope_;
  std::uint64_t chunk_count_ = 0;
  std::vector<std::uint16_t> homes_;  // by worker: its leaf
  std::deque<SwitchState> switches_;
  std::deque<WorkerState> workers_;
  std::deque<Packet> packets_;
  std::deque<std::vector<Id>> networks_;
  std::deque<Step> steps_;
  std::unordered_map<Key, Id> switch_ids_, worker_ids_, packet_ids_, network_ids_;
  Table switch_steps_, worker_steps_;
  std::unordered_map<std::uint64_t, Id> grown_;  // by network and packet
};

std::string text_of(Generation generation);

}  // namespace netfold::model_check
