#include "state_table.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace netfold::model_check {
namespace {

using protocol::Header;
using protocol::SwitchJob;
using protocol::Worker;

constexpr std::uint32_t kJob = 7;
// A chunk is two u32, which the hardware profile adds, too. Two workers' contributions lie in each, so a sum has the
// bits of an i64's.
constexpr std::uint32_t kPayloadBytes = 8;
constexpr std::uint16_t kValues = 2;

Header header_of(std::span<const std::byte> bytes) { return protocol::PacketView::parse(bytes)->header(); }

std::vector<std::byte> bytes_of(const Header& header, std::int64_t value) {
  std::vector<std::byte> bytes(protocol::kHeaderBytes + kPayloadBytes);
  protocol::write_header(header, bytes.data());
  std::memcpy(bytes.data() + protocol::kHeaderBytes, &value, sizeof value);
  return bytes;
}

template <class Machine>
void append_machine(std::string& key, const Machine& machine) {
  std::vector<std::byte> bytes;
  machine.append_canonical(bytes);
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

const std::string kMismatchOfAgreed = "a mismatch is reported for a chunk on which all workers agree";

std::string dropped(protocol::Drop reason) { return std::string("dropped: ") + protocol::name(reason); }

}  // namespace

StateTable::StateTable(const Scope& scope) : scope_(scope), script_(scope) {
  for (std::uint16_t leaf = 0; leaf < scope.leaves.size(); ++leaf) {
    leaves_.resize(leaves_.size() + scope.leaves[leaf], leaf);
  }
}

std::uint16_t StateTable::lowest_worker_below(std::uint16_t leaf) const {
  return static_cast<std::uint16_t>(std::ranges::find(leaves_, leaf) - leaves_.begin());
}

std::uint16_t StateTable::index_at_switch(std::uint16_t worker) const {
  return scope_.leaves.empty() ? worker : static_cast<std::uint16_t>(worker - lowest_worker_below(leaf_of(worker)));
}

Packet StateTable::foreign_packet(std::uint16_t worker, std::uint64_t chunk, bool from_switch) const {
  const Script::Operations& operations = script_.operations_of(worker);
  const std::size_t operation = std::min<std::size_t>(Script::operation_at(operations, chunk), operations.size() - 1);
  const Header header{.flags = static_cast<std::uint8_t>(from_switch ? protocol::kFromSwitch : 0),
                      .job = kJob + 1,
                      .epoch = Generation{}.epoch,
                      .incarnation = Generation{}.incarnation,
                      .chunk = chunk,
                      .operation = static_cast<std::uint32_t>(operation),
                      .elements = kValues * operations[operation],
                      .worker = index_at_switch(worker),
                      .count = kValues,
                      .wire = static_cast<std::uint8_t>(kernels::DType::u32),
                      .reduce = static_cast<std::uint8_t>(kernels::ReduceOp::sum)};
  return {.from_switch = from_switch,
          .worker = worker,
          .chunk = chunk,
          .generation = {},
          .foreign = true,
          .bytes = bytes_of(header, 0)};  // 0 is in no sum
}

std::vector<Id> StateTable::first_packets() {
  if (scope_.foreign_packets) return foreign_packets();
  return scope_.rogue ? rogue_packets() : std::vector<Id>{};
}

// Two contributions to each chunk number, those beyond the operation and those with high bits set included.
std::vector<Id> StateTable::rogue_packets() {
  const auto rogue = static_cast<std::uint16_t>(scope_.workers - 1);
  const std::uint64_t chunks = scope_.chunk_bits > 0 ? std::uint64_t{2} << scope_.chunk_bits : kRogueChunks;
  std::vector<Id> packets;
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    for (const std::uint64_t number : {chunk, kRogueChunks + chunk}) {
      Packet packet = foreign_packet(rogue, chunk, false);
      Header header = header_of(packet.bytes);
      header.job = kJob;
      packet.foreign = false;
      packet.bytes = bytes_of(header, script_.contribution(Generation{}, rogue, number));
      packets.push_back(packet_id(std::move(packet)));
    }
  }
  return packets;
}

std::vector<Id> StateTable::foreign_packets() {
  std::vector<Id> packets;
  for (std::uint64_t chunk = 0; chunk < script_.chunk_count(); ++chunk) {
    for (const bool from_switch : {false, true}) {
      for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
        packets.push_back(packet_id(foreign_packet(worker, chunk, from_switch)));
      }
      for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
        Packet packet = foreign_packet(lowest_worker_below(leaf), chunk, from_switch);
        Header header = header_of(packet.bytes);
        header.worker = packet.worker = leaf;
        packet.leaf = true;
        protocol::write_header(header, packet.bytes.data());
        packets.push_back(packet_id(std::move(packet)));
      }
    }
  }
  return packets;
}

bool StateTable::can_call(Id worker) const {
  const WorkerState& state = workers_[worker];
  return !state.ended && state.called < script_.operations_of(state.index).size();
}

bool StateTable::finished(Id worker) const {
  const WorkerState& state = workers_[worker];
  return state.ended || (!can_call(worker) && state.now.machine.idle());
}

protocol::JobConfig StateTable::config_of(Generation generation, std::uint16_t first_worker,
                                          std::uint16_t workers) const {
  std::vector<std::uint16_t> names(workers);
  std::iota(names.begin(), names.end(), first_worker);
  return {.job = kJob,
          .epoch = generation.epoch,
          .incarnation = generation.incarnation,
          .workers = workers,
          .window = scope_.window,
          .payload_bytes = kPayloadBytes,
          .names = std::move(names)};
}

Id StateTable::new_switch(Generation generation, std::uint32_t restarts,
                          const std::array<Generation, kMaxLeaves>& leaves) {
  const auto leaf_count = static_cast<std::uint16_t>(scope_.leaves.size());
  auto config = config_of(generation, 0, leaf_count == 0 ? scope_.workers : leaf_count);
  for (std::uint16_t leaf = 0; leaf < leaf_count; ++leaf) config.names[leaf] = lowest_worker_below(leaf);
  if (leaf_count == 0) config.names.clear();
  SwitchState state{.machine = SwitchJob(config), .restarts = restarts, .leaves = leaves};
  if (scope_.chunk_bits > 0 && is_pipeline(state)) state.machine = TofinoJob(config, scope_.chunk_bits);
  return switch_id(std::move(state));
}

Id StateTable::new_leaf(Id root, std::uint16_t leaf) {
  const Generation above = switches_[root].generation();
  auto config = config_of(switches_[root].leaves[leaf], lowest_worker_below(leaf), scope_.leaves[leaf]);
  config.parent = protocol::ParentLink{kJob, above.epoch, above.incarnation, leaf};
  SwitchState state{.machine = SwitchJob(config), .leaf = leaf};
  if (scope_.chunk_bits > 0 && is_pipeline(state)) state.machine = TofinoJob(config, scope_.chunk_bits);
  return switch_id(std::move(state));
}

Id StateTable::new_worker(Id machine, std::uint16_t worker) {
  const Generation generation = switches_[machine].generation();
  WorkerState state{.now = {Worker({.job = kJob,
                                    .epoch = generation.epoch,
                                    .incarnation = generation.incarnation,
                                    .worker = index_at_switch(worker),
                                    .workers = scope_.workers,
                                    .window = scope_.window,
                                    .payload_bytes = kPayloadBytes}),
                            1},
                    .index = worker,
                    .root_generation = switches_[machine].root_generation()};
  return finish(std::move(state), {}).next;
}

const Step& StateTable::remember(StepIds& known, Step (StateTable::*compute)(Id, Id), Id machine, Id packet) {
  if (known.size() <= machine) known.resize(machine + 1);
  if (known[machine].size() <= packet) known[machine].resize(packets_.size(), kNoId);
  if (known[machine][packet] == kNoId) {
    steps_.push_back((this->*compute)(machine, packet));
    known[machine][packet] = static_cast<Id>(steps_.size() - 1);
  }
  return steps_[known[machine][packet]];
}

Step StateTable::finish(WorkerState state, Step step) {
  if (step.broken.empty()) step.next = worker_id(std::move(state), step);
  return step;
}

Packet StateTable::answer_to(const SwitchState& from, std::uint16_t worker) const {
  const bool root = from.leaf == SwitchState::kRoot;
  const auto to = static_cast<std::uint16_t>(root ? worker : lowest_worker_below(from.leaf) + worker);
  return {.from_switch = true, .leaf = root && !scope_.leaves.empty(), .worker = to, .generation = from.generation()};
}

Step StateTable::switch_step(Id machine, Id packet) {
  Step step;
  SwitchState state = switches_[machine];
  receive_at_switch(state, packets_[packet], step);
  if (state.sum_requests > scope_.timeouts) return {.next = machine, .sent = {}, .became = "comes later", .broken = {}};
  if (step.broken.empty()) step.next = switch_id(std::move(state));
  return step;
}

bool StateTable::is_pipeline(const SwitchState& state) const {
  return (scope_.pipelines >> (state.leaf == SwitchState::kRoot ? 0 : 1 + state.leaf) & 1) != 0;
}

void StateTable::receive_at_tofino(SwitchState& state, const Packet& packet, Step& step) {
  std::vector<std::byte> bytes = packet.bytes;
  const auto handled = std::get<TofinoJob>(state.machine).handle_packet(bytes, packet.from_switch);
  switch (handled.outcome) {
    case SwitchJob::Outcome::stored:
      step.became = "stored";
      return;
    case SwitchJob::Outcome::completed:
      step.became = "completed";
      break;
    case SwitchJob::Outcome::resend_result:
      step.became = "answered again";
      break;
    case SwitchJob::Outcome::mismatch:
      step.became = "mismatch";
      if (script_.agreed(handled.chunk) && !scope_.rogue) step.broken = kMismatchOfAgreed;
      break;
    case SwitchJob::Outcome::summed:
    case SwitchJob::Outcome::resend_sum:
      return send_pipelined_sum(state, handled, bytes, step);
    case SwitchJob::Outcome::nack:
      step.became = "ignored a NACK";
      return;
    case SwitchJob::Outcome::dropped:
      step.became = dropped(handled.drop);
      return;
  }
  if (handled.outcome != SwitchJob::Outcome::mismatch) announce(state, bytes, step);
  for (std::uint16_t worker = 0; worker < state.config().workers; ++worker) {
    if (handled.outcome != SwitchJob::Outcome::resend_result || worker == handled.worker) {
      send_result(state, worker, bytes, step);
    }
  }
}

void StateTable::send_pipelined_sum(SwitchState& state, const SwitchJob::Handled& handled,
                                    std::span<const std::byte> sum, Step& step) {
  step.became = handled.outcome == SwitchJob::Outcome::summed ? "summed" : "sums again";
  std::vector<std::byte> bytes(sum.begin(), sum.end());
  if (scope_.numbers > 0) {
    state.sum_requests += handled.outcome == SwitchJob::Outcome::resend_sum;
    Header header = header_of(sum);
    header.packet_number = state.numbers.newest += scope_.numbers;
    protocol::write_header(header, bytes.data());
  }
  send_sum(state, bytes, step);
}

void StateTable::announce(SwitchState& state, std::span<const std::byte> result, Step& step) const {
  const std::uint64_t chunk = header_of(result).chunk;
  if (chunk >= kMaxChunks) return;
  std::int64_t value = 0;
  std::memcpy(&value, result.data() + protocol::kHeaderBytes, sizeof value);
  if (state.announced[chunk] != 0 && state.announced[chunk] != value) {
    step.broken = "the result of chunk " + std::to_string(chunk) + " changes:" + script_.describe_sum(value);
  }
  state.announced[chunk] = value;
}

void StateTable::receive_at_switch(SwitchState& state, const Packet& packet, Step& step) {
  if (std::holds_alternative<TofinoJob>(state.machine)) return receive_at_tofino(state, packet, step);
  const bool from_parent = packet.from_switch;
  SwitchJob& machine = state.job();
  const auto handled = from_parent ? machine.handle_parent(packet.bytes) : machine.handle_packet(packet.bytes);
  const Header header = header_of(packet.bytes);
  // As in core/native/dataplane/job_port.cpp: only packets of this generation and this job count.
  const bool belongs = handled.outcome != SwitchJob::Outcome::dropped || handled.drop == protocol::Drop::stale ||
                       handled.drop == protocol::Drop::duplicate;
  const bool has_nacks = scope_.numbers > 0 && !is_pipeline(state);
  if (has_nacks && !from_parent && belongs) observe_number(state, header, step);
  switch (handled.outcome) {
    case SwitchJob::Outcome::dropped:
      step.became = dropped(handled.drop);
      break;
    case SwitchJob::Outcome::stored:
      step.became = "stored";
      break;
    case SwitchJob::Outcome::completed:
      step.became = "completed";
      announce(state, machine.frame(handled.slot), step);
      for (std::uint16_t worker = 0; worker < machine.config().workers; ++worker) {
        send_result(state, worker, machine.frame(handled.slot), step);
      }
      if (has_nacks && from_parent) {
        state.numbers.record_result(handled.chunk, header.packet_number);
        state.sender.handle_result(handled.slot, header.packet_number);
        send_sums(state, allowed_by(packet, state.numbers, false), step);
      }
      break;
    case SwitchJob::Outcome::summed:
    case SwitchJob::Outcome::resend_sum: {
      if (!has_nacks) {
        send_pipelined_sum(state, handled, machine.sum(handled.slot, 0), step);
        break;
      }
      step.became = handled.outcome == SwitchJob::Outcome::summed ? "summed" : "sums again";
      state.sum_requests += handled.outcome == SwitchJob::Outcome::resend_sum;
      state.sender.offer(handled.slot);
      const std::uint64_t last = state.numbers.sent[handled.chunk];
      send_sums(state, [last](std::uint64_t number) { return number == last; }, step);
      if (state.numbers.sent[handled.chunk] == last) step.broken = "a leaf does not send a sum that a worker asks for";
      break;
    }
    case SwitchJob::Outcome::nack: {
      step.became = has_nacks ? "received a NACK" : "ignored a NACK";
      if (!has_nacks) break;
      const SentNumbers before = state.numbers;
      state.sender.handle_nack(header.chunk, header.elements);
      send_sums(state, allowed_by(packet, before, false), step);
      if (step.broken.empty() && !resends_named(packet, before, state.numbers)) {
        step.broken = "a leaf does not send again what a NACK names";
      }
      break;
    }
    case SwitchJob::Outcome::resend_result:
      step.became = "answered again";
      announce(state, machine.frame(handled.slot), step);
      send_result(state, handled.worker, machine.frame(handled.slot), step);
      break;
    case SwitchJob::Outcome::mismatch:
      step.became = "mismatch";
      send_mismatches(state, handled, header, from_parent, step);
      break;
  }
}

void StateTable::send_result(const SwitchState& state, std::uint16_t worker, std::span<const std::byte> bytes,
                             Step& step) {
  Packet packet = answer_to(state, worker);
  packet.bytes = {bytes.begin(), bytes.end()};
  Header header = header_of(bytes);
  if (scope_.numbers == 0) header.packet_number = 0;
  protocol::write_header(header, packet.bytes.data());
  packet.chunk = header.chunk;
  packet.generation = {header.incarnation, header.epoch};
  step.sent.push_back(packet_id(std::move(packet)));
}

// As in core/native/dataplane/job_port.cpp.
void StateTable::send_mismatches(const SwitchState& state, const SwitchJob::Handled& handled, const Header& header,
                                 bool from_parent, Step& step) {
  if (script_.agreed(handled.chunk)) {
    step.broken = kMismatchOfAgreed;
    return;
  }
  const SwitchJob& machine = state.job();
  const auto send_to = [&](std::uint16_t to, const protocol::CallDescriptor& call, std::uint16_t about) {
    Packet packet = answer_to(state, to);
    packet.chunk = handled.chunk;
    packet.bytes.resize(machine.packet_bytes());
    machine.write_mismatch(handled.chunk, call, about, 0, packet.bytes.data());  // the number is only a nonce
    step.sent.push_back(packet_id(std::move(packet)));
  };
  const std::uint16_t about = from_parent ? header.worker : machine.name_of(handled.worker);
  for (std::uint16_t to = 0; to < machine.config().workers; ++to) {
    if (from_parent || to != handled.worker) send_to(to, protocol::CallDescriptor::of(header), about);
  }
  if (!from_parent) send_to(handled.worker, machine.descriptor(handled.slot), machine.name_of(handled.other));
}

void StateTable::send_sum(const SwitchState& state, std::span<const std::byte> sum, Step& step) {
  step.sent.push_back(packet_id({.leaf = true,
                                 .worker = state.leaf,
                                 .chunk = header_of(sum).chunk,
                                 .generation = state.root_generation(),
                                 .bytes = {sum.begin(), sum.end()}}));
}

Step StateTable::worker_step(Id machine, Id packet) {
  Step step;
  if (ended(machine)) return {.next = machine, .sent = {}, .became = "ended before", .broken = {}};
  WorkerState state = workers_[machine];
  if (scope_.numbers > 0) {
    receive_numbered(state, packets_[packet], step);
    return finish(std::move(state), std::move(step));
  }
  if (!receive(state, packets_[packet], step) || !send(state, step)) return step;
  for (const TimedWorker& later : workers_[machine].later) {
    Step late_step;
    WorkerState late = workers_[machine];
    late.now = later;
    if (!receive(late, packets_[packet], late_step) || !send(late, late_step)) return late_step;
    if (key_of(late) != key_of(state) || late_step.became != step.became) {
      step.broken = "the effect of an answer depends on the worker's timers";
      return step;
    }
  }
  return finish(std::move(state), std::move(step));
}

Step StateTable::call(Id worker) {
  Step step;
  WorkerState state = workers_[worker];
  call(state, step);
  return finish(std::move(state), std::move(step));
}

void StateTable::call(WorkerState& state, Step& step) {
  state.now.machine.start({.operation = state.called,
                           .elements = kValues * script_.operations_of(state.index)[state.called],
                           .wire = kernels::DType::u32,
                           .reduce = kernels::ReduceOp::sum});
  ++state.called;
  step.became = "called";
  send(state, step, [](std::uint64_t) { return false; });
}

Step StateTable::hear(Id worker) {
  WorkerState state = workers_[worker];
  state.ended = true;
  return finish(std::move(state), {.sent = {}, .became = "ended", .broken = {}});
}

bool StateTable::receive(WorkerState& worker, const Packet& packet, Step& step) const {
  const auto received = worker.now.machine.handle_packet(packet.bytes, worker.now.now_ns);
  switch (received.outcome) {
    case Worker::Outcome::dropped:
      step.became = dropped(received.drop);
      return true;
    case Worker::Outcome::mismatch:
      return check_mismatch(worker, received.header, step);
    case Worker::Outcome::received:
      return check_result(worker, received, step);
    case Worker::Outcome::nack:
      step.became = "received a NACK";
      return true;
  }
  return false;
}

bool StateTable::check_mismatch(WorkerState& worker, const Header& header, Step& step) const {
  const Script::Operations& operations = script_.operations_of(worker.index);
  const std::uint32_t own = Script::operation_at(operations, header.chunk);
  step.became = "ended: mismatch";
  if (script_.agreed(header.chunk)) {
    step.broken = kMismatchOfAgreed;
  } else if (own < operations.size() && header.operation == own && header.elements == kValues * operations[own]) {
    step.broken = "a mismatch names a worker with the reader's own call";
  }
  worker.ended = true;
  return step.broken.empty();
}

bool StateTable::check_result(WorkerState& worker, const Worker::Received& received, Step& step) const {
  const std::uint64_t chunk = script_.chunk_of(worker.index, received.header.operation, received.first / kValues);
  std::int64_t value = 0;
  if (chunk == script_.chunk_count() || received.values.size() != sizeof value) {
    step.broken = "a worker is given values of no chunk";
    return false;
  }
  std::memcpy(&value, received.values.data(), sizeof value);
  step.became = "received";
  const std::uint64_t bit = std::uint64_t{1} << chunk;
  if (!script_.agreed(chunk)) {
    step.broken = "a worker is given a sum of chunk " + std::to_string(chunk) + ", on which workers disagree";
  } else if (worker.received & bit) {
    step.broken = "a worker is given chunk " + std::to_string(chunk) + " twice";
  } else if (!script_.is_result(worker.root_generation, chunk, value)) {
    step.broken = "a worker is given a wrong sum of chunk " + std::to_string(chunk) + ":" + script_.describe_sum(value);
  }
  worker.received |= bit;
  if (scope_.numbers > 0) worker.numbers.record_result(chunk, received.header.packet_number);
  return step.broken.empty();
}

bool StateTable::send(WorkerState& worker, Step& step, const Allowed& allowed) {
  if (worker.ended) return true;
  // All chunks, and a window of lost ones: more than a worker can ever send at once.
  std::uint64_t left = (script_.chunk_count() + scope_.window + 1) * std::max(1U, scope_.numbers);
  while (const auto send = worker.now.machine.poll_send(worker.now.now_ns)) {
    Header header = send->header;
    const std::uint64_t chunk = script_.chunk_of(worker.index, header.operation, send->first / kValues);
    if (chunk == script_.chunk_count() || send->count != kValues || --left == 0) {
      step.broken = left == 0 ? "a worker sends without end" : "a worker sends values of no chunk";
      return false;
    }
    if (scope_.numbers == 0) {
      header.packet_number = 0;
    } else if (header.packet_number % scope_.numbers != 0) {
      worker.now.machine.not_sent(header.chunk);
      continue;
    } else if (!check_number(worker, chunk, header.packet_number, send->again, allowed, step)) {
      return false;
    }
    const std::size_t known = packets_.size();
    const Id id =
        packet_id({.worker = worker.index,
                   .chunk = header.chunk,
                   .generation = worker.generation(),
                   .bytes = bytes_of(header, script_.contribution(worker.root_generation, worker.index, chunk))});
    const std::uint64_t bit = std::uint64_t{1} << chunk;
    if (scope_.numbers == 0 && (worker.sent & bit) && id == known) {
      step.broken = "a worker sends chunk " + std::to_string(chunk) + " again with other bytes";
      return false;
    }
    worker.sent |= bit;
    step.sent.push_back(id);
  }
  return true;
}

// Adds the state with its `later` states: its timeouts follow one another until nothing is in flight.
Id StateTable::worker_id(WorkerState state, Step& step) {
  std::string key = key_of(state);
  if (const Id known = workers_.find(key); known != kNoId) return known;
  state.later.clear();
  WorkerState late = state;
  Step resent;
  const bool has_timers = !state.ended && scope_.numbers == 0;
  for (std::uint32_t timeouts = has_timers ? state.now.machine.in_flight() : 0; timeouts > 0; --timeouts) {
    late.now.now_ns = std::max(late.now.now_ns, late.now.machine.poll_timeout());
    late.now.machine.handle_timeout(late.now.now_ns);
    state.later.push_back(late.now);  // the chunk is lost, and not yet sent again
    if (!send(late, resent) || late.sent != state.sent) {
      step.broken = resent.broken.empty() ? "a timeout sends a chunk that was never sent" : resent.broken;
      return kNoId;
    }
    state.later.push_back(late.now);
  }
  state.resent = resent.sent;
  return workers_.add(std::move(key), std::move(state));
}

Id StateTable::switch_id(SwitchState state) {
  if (scope_.numbers > 0 && !is_pipeline(state) && state.gap_detectors.empty()) {
    state.gap_detectors.resize(state.config().workers);
    state.received.resize(state.config().workers);
    if (state.leaf != SwitchState::kRoot) state.sender = protocol::ParentSender(state.config().slots());
  }
  std::string key;
  std::visit([&](const auto& machine) { append_machine(key, machine); }, state.machine);
  append(key, state.announced);
  append(key, state.restarts);
  append(key, state.leaf);
  append(key, state.leaves);
  for (const std::uint64_t received : state.received) append(key, received);
  state.numbers.append_canonical(key);
  append(key, state.sum_requests);
  append_machine(key, state.sender);
  return switches_.add(std::move(key), std::move(state));
}

std::string StateTable::key_of(const WorkerState& worker) const {
  const Worker& machine = worker.now.machine;
  std::string key;
  append(key, worker.index);
  append(key, worker.generation());
  append(key, worker.root_generation);
  if (worker.ended) return key;  // the rest has no effect any more
  append(key, worker.called);
  append(key, worker.sent);
  append(key, worker.received);
  append(key, machine.oldest_outstanding());
  append(key, machine.in_flight());
  append(key, machine.sendable());
  append(key, machine.congestion_window());
  append(key, machine.idle());
  if (scope_.numbers == 0) return key;
  // The whole machine: a retransmission has a number of its own.
  append_machine(key, machine);
  worker.numbers.append_canonical(key);
  append(key, worker.timeouts);
  append(key, worker.now.now_ns);
  return key;
}

Id StateTable::packet_id(Packet packet) {
  std::string key(reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size());
  append(key, packet.worker);
  append(key, packet.leaf);
  return packets_.add(std::move(key), std::move(packet));
}

Id StateTable::network_of(std::vector<Id> packets) {
  std::string key(reinterpret_cast<const char*>(packets.data()), packets.size() * sizeof(Id));
  return networks_.add(std::move(key), std::move(packets));
}

Id StateTable::network_with(Id network, const std::vector<Id>& sent) {
  for (const Id packet : sent) {
    const auto [at, added] = grown_.try_emplace(std::uint64_t{network} << 32 | packet, kNoId);
    if (added) {
      std::vector<Id> packets = networks_[network];
      const auto before = std::ranges::lower_bound(packets, packet);
      if (before == packets.end() || *before != packet) packets.insert(before, packet);
      at->second = network_of(std::move(packets));
    }
    network = at->second;
  }
  return network;
}

Id StateTable::network_without(Id network, Id packet) {
  std::vector<Id> packets = networks_[network];
  std::erase(packets, packet);
  return network_of(std::move(packets));
}

}  // namespace netfold::model_check
