// The states of the machines, the packets and the networks of a search. Each is kept once and has a number, so a state
// of the search is a few numbers. The effect of a packet on a machine depends on these two alone; it is computed once
// and remembered.
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
#include <variant>

#include "interned.hpp"
#include "script.hpp"
#include "tofino_job.hpp"

namespace netfold::model_check {

// Possibility is broken: some state has no path to the end.
inline const std::string kStuck = "from here, with all packets lost, no sequence of retransmissions leads to the end";

// A packet between a worker, or a leaf, and its switch. Its packet number is 0, unless the scope has numbers.
struct Packet {
  bool from_switch = false;
  bool nack = false;
  bool leaf = false;         // between a leaf and the root
  std::uint16_t worker = 0;  // index of the worker, or of the leaf, among all
  std::uint64_t chunk = 0;   // of a NACK: the first packet number that it names
  Generation generation;
  bool foreign = false;  // of another job
  std::vector<std::byte> bytes;
};

// One sender's packets and their results, in a scope with numbers. Bits count from chunk 0, or from number 1.
struct SentNumbers {
  std::array<std::uint64_t, kMaxChunks> sent{};  // by chunk: number of its last packet
  std::uint64_t newest = 0;                      // number of the last packet
  std::uint64_t answered = 0;                    // highest number of a packet whose chunk has its result
  std::uint64_t results = 0;                     // bitmap of the numbers of results that came
  std::uint64_t received = 0;                    // bitmap of the chunks that have their result
  bool skipped = false;                          // a result came before one with a lower number, which may be lost
  void record_result(std::uint64_t chunk, std::uint64_t number);
  void append_canonical(std::string& key) const;
};

struct SwitchState {
  std::variant<protocol::SwitchJob, TofinoJob> machine;
  std::uint32_t restarts = 0;                             // so far; of a leaf: 0
  std::uint16_t leaf = kRoot;                             // its index
  std::array<Generation, kMaxLeaves> leaves = {};         // of the root: the generation that each leaf has in this one
  std::vector<protocol::GapDetector> gap_detectors = {};  // by child
  std::vector<std::uint64_t> received = {};               // by child: bitmap of its packets; determines its GapDetector
  protocol::ParentSender sender{0};                       // of a leaf
  SentNumbers numbers = {};                               // of a leaf's packets to the root
  std::uint32_t sum_requests = 0;                         // to send sums once more
  std::array<std::int64_t, kMaxChunks> announced = {};    // by chunk: its result; 0: none so far
  static constexpr std::uint16_t kRoot = 0xffff;
  protocol::SwitchJob& job() { return std::get<protocol::SwitchJob>(machine); }
  const protocol::SwitchJob& job() const { return std::get<protocol::SwitchJob>(machine); }
  const protocol::JobConfig& config() const {
    return std::visit([](const auto& each) -> const protocol::JobConfig& { return each.config(); }, machine);
  }
  Generation generation() const { return {config().incarnation, config().epoch}; }
  // The root's generation, which differs between any two generations of a tree.
  Generation root_generation() const {
    const auto& parent = config().parent;
    return parent ? Generation{parent->incarnation, parent->epoch} : generation();
  }
};

struct TimedWorker {
  protocol::Worker machine;
  std::int64_t now_ns = 0;  // of its clock
};

struct WorkerState {
  TimedWorker now;
  std::uint16_t index = 0;         // among all workers; the machine knows the worker's index at its switch
  std::uint32_t called = 0;        // operations
  std::uint64_t sent = 0;          // bitmap of chunks
  std::uint64_t received = 0;      // bitmap of chunks
  bool ended = false;              // by a mismatch
  Generation root_generation;      // the root's when the worker joined; without leaves its own
  std::vector<TimedWorker> later;  // the same worker after each of its timeouts
  std::vector<Id> resent;          // packets that its timeouts send again, in this order
  SentNumbers numbers;
  std::uint32_t timeouts = 0;  // so far, in a scope with numbers
  Generation generation() const { return {now.machine.config().incarnation, now.machine.config().epoch}; }
};

// The effect of an event on a machine.
struct Step {
  Id next = kNoId;
  std::vector<Id> sent;  // packets
  std::string became;    // in words
  std::string broken;    // the promise that the step breaks, or empty; a broken step has no next
};

class StateTable {
 public:
  // Throws std::invalid_argument for a scope that is contradictory or beyond a bound.
  explicit StateTable(const Scope& scope);

  Id new_switch(Generation generation, std::uint32_t restarts, const std::array<Generation, kMaxLeaves>& leaves = {});
  // A leaf of the generation that the root has for it.
  Id new_leaf(Id root, std::uint16_t leaf);
  // A worker of that switch, or leaf.
  Id new_worker(Id machine, std::uint16_t worker);
  // The packets that the network holds from the start: another job's, and a rogue worker's.
  std::vector<Id> first_packets();
  std::uint16_t leaf_of(std::uint16_t worker) const { return leaves_[worker]; }

  bool can_call(Id worker) const;
  bool can_time_out(Id worker) const;
  bool ended(Id worker) const { return workers_[worker].ended; }
  // Whether the worker has all results of its script, or has ended.
  bool finished(Id worker) const;

  // The effect of a packet. The references stay valid.
  const Step& at_switch(Id machine, Id packet) {
    return remember(switch_steps_, &StateTable::switch_step, machine, packet);
  }
  const Step& at_worker(Id machine, Id packet) {
    return remember(worker_steps_, &StateTable::worker_step, machine, packet);
  }
  // The worker calls its next operation. Precondition: can_call.
  Step call(Id worker);
  // The worker learns that another worker has ended.
  Step hear(Id worker);
  // The worker's timer expires, in a scope with numbers. Precondition: can_time_out.
  Step timeout(Id worker);
  // In a scope with numbers: plays these machines to the end by timeouts alone, after all packets in the network were
  // lost; returns the promise that breaks, or empty.
  std::string broken_by_timeouts(Id machine, std::vector<Id> leaves, const std::vector<Id>& workers);

  const SwitchState& switch_state(Id id) const { return switches_[id]; }
  const WorkerState& worker_state(Id id) const { return workers_[id]; }
  const Packet& packet(Id id) const { return packets_[id]; }

  // A network is its packets in ascending order.
  const std::vector<Id>& network(Id id) const { return networks_[id]; }
  Id network_of(std::vector<Id> packets);
  Id network_with(Id network, const std::vector<Id>& sent);
  Id network_without(Id network, Id packet);

  std::size_t switch_count() const { return switches_.size(); }
  std::size_t worker_count() const { return workers_.size(); }
  std::size_t packet_count() const { return packets_.size(); }

 private:
  // Whether a chunk may be sent again, by the number of its last packet.
  using Allowed = std::function<bool(std::uint64_t)>;
  using StepIds = std::deque<std::vector<Id>>;  // by machine and packet

  Id switch_id(SwitchState state);
  Id worker_id(WorkerState state, Step& step);
  Id packet_id(Packet packet);
  std::string key_of(const WorkerState& worker) const;
  const Step& remember(StepIds& known, Step (StateTable::*compute)(Id, Id), Id machine, Id packet);

  // A packet reaches a switch, or a leaf.
  Step switch_step(Id machine, Id packet);
  void receive_at_switch(SwitchState& state, const Packet& packet, Step& step);
  // The pipeline of core/native/p4/netfold_tna.p4.
  void receive_at_tofino(SwitchState& state, const Packet& packet, Step& step);
  // A leaf without a sender of sums sends one, with the next number.
  void send_pipelined_sum(SwitchState& state, const protocol::SwitchJob::Handled& handled,
                          std::span<const std::byte> sum, Step& step);
  // Whether the switch has no NACKs and no sender of sums.
  bool is_pipeline(const SwitchState& state) const;
  void send_result(const SwitchState& state, std::uint16_t worker, std::span<const std::byte> bytes, Step& step);
  // Checks that a chunk has one result for good.
  void announce(SwitchState& state, std::span<const std::byte> result, Step& step) const;
  void send_mismatches(const SwitchState& state, const protocol::SwitchJob::Handled& handled,
                       const protocol::Header& header, bool from_parent, Step& step);
  void send_sum(const SwitchState& state, std::span<const std::byte> sum, Step& step);
  // A packet to a worker, or a leaf, by its index at this switch; without its bytes.
  Packet answer_to(const SwitchState& from, std::uint16_t worker) const;

  // A packet reaches a worker.
  Step worker_step(Id machine, Id packet);
  // Return false where a promise broke.
  bool receive(WorkerState& worker, const Packet& packet, Step& step) const;
  bool check_result(WorkerState& worker, const protocol::Worker::Received& received, Step& step) const;
  bool check_mismatch(WorkerState& worker, const protocol::Header& header, Step& step) const;
  // Sends all that the worker sends now.
  bool send(WorkerState& worker, Step& step, const Allowed& allowed = {});
  void call(WorkerState& state, Step& step);
  Step finish(WorkerState state, Step step);

  // packet_numbers.cpp: scopes with numbers.
  void receive_numbered(WorkerState& state, const Packet& packet, Step& step);
  void timeout(WorkerState& state, Step& step);
  // Runs gap detection at the switch, and sends the NACK.
  void observe_number(SwitchState& state, const protocol::Header& header, Step& step);
  // Sends all sums that the leaf's sender has due.
  void send_sums(SwitchState& state, const Allowed& allowed, Step& step);
  // Checks and records the number of a worker's packet.
  bool check_number(WorkerState& worker, std::uint64_t chunk, std::uint64_t packet_number, bool again,
                    const Allowed& allowed, Step& step) const;
  // The retransmissions that a result, or a NACK, allows.
  Allowed allowed_by(const Packet& packet, const SentNumbers& numbers, bool timed_out) const;
  // Whether every chunk that the NACK names, and that has no result, was sent again.
  bool resends_named(const Packet& nack, const SentNumbers& before, const SentNumbers& after) const;

  protocol::JobConfig config_of(Generation generation, std::uint16_t first_worker, std::uint16_t workers) const;
  std::uint16_t lowest_worker_below(std::uint16_t leaf) const;
  std::uint16_t index_at_switch(std::uint16_t worker) const;
  std::vector<Id> foreign_packets();
  std::vector<Id> rogue_packets();
  // Another job's packet with the worker's call at that chunk.
  Packet foreign_packet(std::uint16_t worker, std::uint64_t chunk, bool from_switch) const;

  Scope scope_;
  Script script_;
  std::vector<std::uint16_t> leaves_;  // by worker: its leaf
  Interned<SwitchState> switches_;
  Interned<WorkerState> workers_;
  Interned<Packet> packets_;
  Interned<std::vector<Id>> networks_;
  std::deque<Step> steps_;
  StepIds switch_steps_, worker_steps_;
  std::unordered_map<std::uint64_t, Id> grown_;  // networks, by network and added packet
};

}  // namespace netfold::model_check
