#include "state_table.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace netfold::model_check {
namespace {

using protocol::Header;
using protocol::SwitchJob;
using protocol::Worker;

constexpr std::uint32_t kJob = 7;
constexpr std::uint32_t kPayloadBytes = 8;  // one i64: a chunk is an element
constexpr std::int64_t kNumbers = 1024;     // contributions are in [1024, 2048)
constexpr int kWorkerBits = 16;
constexpr std::uint64_t kMaxNumbers = 64;                 // packets of one sender, where they are numbered
constexpr std::uint32_t kGenerations = kMaxRestarts + 1;  // most incarnations, and most epochs of one

std::uint64_t chunks_of(const std::vector<std::uint32_t>& line) {
  return std::accumulate(line.begin(), line.end(), std::uint64_t{0});
}

void check(const Scope& scope) {
  const std::uint64_t chunks = std::max(chunks_of(scope.operations), chunks_of(scope.last));
  const auto is_zero = [](std::uint32_t each) { return each == 0; };
  const bool empty = std::ranges::any_of(scope.operations, is_zero) || std::ranges::any_of(scope.last, is_zero);
  if (scope.workers == 0 || scope.workers > kMaxWorkers) {
    throw std::invalid_argument("a scope has 1 to " + std::to_string(kMaxWorkers) + " workers");
  }
  const std::size_t operations = std::max(scope.operations.size(), scope.last.size());
  if (scope.operations.empty() || empty || chunks > kMaxChunks || operations > Worker::kMaxOperations) {
    throw std::invalid_argument("a scope has 1 to " + std::to_string(kMaxChunks) + " chunks, in 1 to " +
                                std::to_string(Worker::kMaxOperations) + " operations, none of them empty");
  }
  if (scope.restarts > kMaxRestarts) {
    throw std::invalid_argument("a scope has at most " + std::to_string(kMaxRestarts) + " restarts");
  }
  if (scope.numbers == 0 && scope.timeouts > 0) throw std::invalid_argument("timers are counted where packets are");
  if (scope.numbers > 0 && (!scope.last.empty() || scope.network != Network::monotone ||
                            scope.numbers * kMaxNumbers > std::numeric_limits<std::uint32_t>::max())) {
    throw std::invalid_argument("a scope with numbers has a monotone network, and no worker that calls something else");
  }
  if (scope.leaves.empty()) return;
  std::uint32_t below = 0;
  for (const std::uint16_t each : scope.leaves) below += each;
  const bool childless = std::ranges::any_of(scope.leaves, [](std::uint16_t each) { return each == 0; });
  if (childless || scope.leaves.size() > kMaxLeaves || below != scope.workers) {
    throw std::invalid_argument("a scope has no leaves, or 1 to " + std::to_string(kMaxLeaves) +
                                " with all of its workers below them");
  }
}

template <class T>
void append(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string dropped(protocol::Drop reason) { return std::string("dropped: ") + protocol::name(reason); }

}  // namespace

std::string text_of(Generation generation) {
  return std::to_string(generation.incarnation) + "." + std::to_string(generation.epoch);
}

StateTable::StateTable(const Scope& scope) : scope_(scope) {
  check(scope);
  chunk_count_ = std::max(chunks_of(scope.operations), chunks_of(scope.last));
  for (std::uint16_t leaf = 0; leaf < scope.leaves.size(); ++leaf)
    homes_.resize(homes_.size() + scope.leaves[leaf], leaf);
}

std::uint16_t StateTable::first_below(std::uint16_t leaf) const {
  return static_cast<std::uint16_t>(std::ranges::find(homes_, leaf) - homes_.begin());
}

std::uint16_t StateTable::place_of(std::uint16_t worker) const {
  return scope_.leaves.empty() ? worker : static_cast<std::uint16_t>(worker - first_below(leaf_of(worker)));
}

Packet StateTable::foreign_packet(std::uint16_t worker, std::uint64_t chunk, bool from_switch) const {
  const Script& line = script_of(worker);
  const std::uint32_t operation =
      std::min<std::uint32_t>(operation_at(line, chunk), static_cast<std::uint32_t>(line.size() - 1));
  const Header header{.flags = static_cast<std::uint8_t>(from_switch ? protocol::kFromSwitch : 0),
                      .job = kJob + 1,
                      .epoch = Generation{}.epoch,
                      .incarnation = Generation{}.incarnation,
                      .chunk = chunk,
                      .operation = operation,
                      .elements = line[operation],
                      .worker = place_of(worker),
                      .count = 1,
                      .wire = static_cast<std::uint8_t>(kernels::DType::i64),
                      .reduce = static_cast<std::uint8_t>(kernels::ReduceOp::sum)};
  Packet packet{.from_switch = from_switch, .worker = worker, .chunk = chunk, .generation = {}, .foreign = true};
  packet.bytes.resize(protocol::kHeaderBytes + kPayloadBytes);  // of zeros, which are in no sum
  protocol::write_header(header, packet.bytes.data());
  return packet;
}

std::vector<Id> StateTable::foreign_packets() {
  std::vector<Id> packets;
  if (!scope_.foreign_packets) return packets;
  for (std::uint64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    for (const bool from_switch : {false, true}) {
      for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
        packets.push_back(packet_id(foreign_packet(worker, chunk, from_switch)));
      }
      for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) {
        Packet packet = foreign_packet(first_below(leaf), chunk, from_switch);
        Header header = protocol::PacketView::parse(packet.bytes)->header();
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
  return !state.ended && state.called < script_of(state.number).size();
}

bool StateTable::finished(Id worker) const {
  const WorkerState& state = workers_[worker];
  return state.ended || (!can_call(worker) && state.now.machine.idle());
}

Id StateTable::new_switch(Generation generation, std::uint32_t restarts,
                          const std::array<Generation, kMaxLeaves>& leaves) {
  std::vector<std::uint16_t> names;  // of leaves: the lowest worker below each
  for (std::uint16_t leaf = 0; leaf < scope_.leaves.size(); ++leaf) names.push_back(first_below(leaf));
  return switch_id(
      {SwitchJob({.job = kJob,
                  .epoch = generation.epoch,
                  .incarnation = generation.incarnation,
                  .workers = scope_.leaves.empty() ? scope_.workers : static_cast<std::uint16_t>(scope_.leaves.size()),
                  .window = scope_.window,
                  .payload_bytes = kPayloadBytes,
                  .names = std::move(names)}),
       restarts, SwitchState::kRoot, leaves});
}

Id StateTable::new_leaf(Id root, std::uint16_t leaf) {
  const Generation generation = switches_[root].leaves[leaf];
  const Generation above = switches_[root].generation();
  std::vector<std::uint16_t> names(scope_.leaves[leaf]);
  std::iota(names.begin(), names.end(), first_below(leaf));
  return switch_id({SwitchJob({.job = kJob,
                               .epoch = generation.epoch,
                               .incarnation = generation.incarnation,
                               .workers = scope_.leaves[leaf],
                               .window = scope_.window,
                               .payload_bytes = kPayloadBytes,
                               .parent = protocol::ParentLink{kJob, above.epoch, above.incarnation, leaf},
                               .names = std::move(names)}),
                    0, leaf});
}

Id StateTable::new_worker(Id machine, std::uint16_t worker) {
  const Generation generation = switches_[machine].generation();
  WorkerState state{.now = {Worker({.job = kJob,
                                    .epoch = generation.epoch,
                                    .incarnation = generation.incarnation,
                                    .worker = place_of(worker),
                                    .workers = scope_.workers,
                                    .window = scope_.window,
                                    .payload_bytes = kPayloadBytes}),
                            1},
                    .number = worker,
                    .root_generation = switches_[machine].root_generation()};
  Step nothing;
  return worker_id(std::move(state), nothing);
}

const Step& StateTable::at_switch(Id machine, Id packet) {
  auto& known = switch_steps_[machine];
  if (known.size() <= packet) known.resize(packets_.size(), kNoId);
  if (known[packet] == kNoId) {
    steps_.push_back(switch_step(machine, packet));
    switch_steps_[machine][packet] = static_cast<Id>(steps_.size() - 1);
  }
  return steps_[switch_steps_[machine][packet]];
}

const Step& StateTable::at_worker(Id machine, Id packet) {
  auto& known = worker_steps_[machine];
  if (known.size() <= packet) known.resize(packets_.size(), kNoId);
  if (known[packet] == kNoId) {
    steps_.push_back(worker_step(machine, packet));
    worker_steps_[machine][packet] = static_cast<Id>(steps_.size() - 1);
  }
  return steps_[worker_steps_[machine][packet]];
}

Packet StateTable::answer_to(const SwitchState& from, std::uint16_t worker) const {
  const bool root = from.leaf == SwitchState::kRoot;
  const auto to = static_cast<std::uint16_t>(root ? worker : first_below(from.leaf) + worker);
  return {.from_switch = true, .leaf = root && !scope_.leaves.empty(), .worker = to};
}

Step StateTable::switch_step(Id machine, Id packet) {
  Step step;
  SwitchState state = switches_[machine];
  take_at_switch(state, Packet(packets_[packet]), step);
  if (state.asked > scope_.timeouts) return {.next = machine, .sent = {}, .became = "comes later", .broken = {}};
  if (step.broken.empty()) step.next = switch_id(std::move(state));
  return step;
}

void StateTable::take_at_switch(SwitchState& state, const Packet& packet, Step& step) {
  const bool from_parent = packet.from_switch;
  const auto handled =
      from_parent ? state.machine.handle_parent(packet.bytes) : state.machine.handle_packet(packet.bytes);
  const Header header = protocol::PacketView::parse(packet.bytes)->header();
  // As the aggregator does (native/dataplane/data_plane.cpp): by what belongs to this generation and this job, and by nothing
  // else.
  const bool belongs = handled.outcome != SwitchJob::Outcome::dropped || handled.drop == protocol::Drop::stale ||
                       handled.drop == protocol::Drop::duplicate;
  if (scope_.numbers > 0 && !from_parent && belongs) note_number(state, header, step);
  const auto send_result = [&](std::uint16_t worker) {
    const auto frame = state.machine.frame(handled.slot);
    Packet sent = answer_to(state, worker);
    sent.bytes = {frame.begin(), frame.end()};
    Header result = protocol::PacketView::parse(frame)->header();
    if (scope_.numbers == 0) result.packet_number = 0;
    protocol::write_header(result, sent.bytes.data());
    sent.chunk = result.chunk;
    sent.generation = {result.incarnation, result.epoch};
    step.sent.push_back(packet_id(std::move(sent)));
  };
  switch (handled.outcome) {
    case SwitchJob::Outcome::dropped:
      step.became = dropped(handled.drop);
      break;
    case SwitchJob::Outcome::stored:
      step.became = "stored";
      break;
    case SwitchJob::Outcome::completed:
      step.became = "completed";
      for (std::uint16_t worker = 0; worker < state.machine.config().workers; ++worker) send_result(worker);
      if (scope_.numbers > 0 && from_parent) {
        state.numbers.take_result(handled.chunk, header.packet_number);
        state.sender.handle_result(handled.slot, header.packet_number);
        send_sums(state, allowed_by(packet, state.numbers, false), step);
      }
      break;
    case SwitchJob::Outcome::summed:
    case SwitchJob::Outcome::resend_sum: {
      step.became = handled.outcome == SwitchJob::Outcome::summed ? "summed" : "sums again";
      if (scope_.numbers > 0) {
        state.asked += handled.outcome == SwitchJob::Outcome::resend_sum;
        state.sender.offer(handled.slot);
        const std::uint64_t asked = state.numbers.sent[handled.chunk];
        send_sums(state, [asked](std::uint64_t number) { return number == asked; }, step);
        if (state.numbers.sent[handled.chunk] == asked) step.broken = "a leaf does not send a sum that is asked for";
        break;
      }
      const auto sum = state.machine.sum(handled.slot, 0);
      step.sent.push_back(packet_id({.leaf = true,
                                     .worker = state.leaf,
                                     .chunk = handled.chunk,
                                     .generation = state.root_generation(),
                                     .bytes = {sum.begin(), sum.end()}}));
      break;
    }
    case SwitchJob::Outcome::nack: {
      step.became = "told of a loss";
      const SentNumbers before = state.numbers;
      state.sender.handle_nack(header.chunk, header.elements);
      send_sums(state, allowed_by(packet, before, false), step);
      if (step.broken.empty() && !heeded(packet, before, state.numbers)) {
        step.broken = "a leaf does not send again what a NACK names";
      }
      break;
    }
    case SwitchJob::Outcome::resend_result:
      step.became = "answered again";
      send_result(handled.worker);
      break;
    case SwitchJob::Outcome::mismatch: {
      step.became = "mismatch";
      if (agreed(handled.chunk)) {
        step.broken = "workers that agree are said not to";
        return;
      }
      // As the aggregator tells them (native/dataplane/data_plane.cpp).
      const SwitchJob& job = state.machine;
      const auto tell = [&](std::uint16_t to, const protocol::CallDescriptor& said, std::uint16_t about) {
        Packet sent = answer_to(state, to);
        sent.chunk = handled.chunk;
        sent.generation = state.generation();
        sent.bytes.resize(state.machine.packet_bytes());
        // Its number is a nonce, which no machine looks at.
        state.machine.write_mismatch(handled.chunk, said, about, 0, sent.bytes.data());
        step.sent.push_back(packet_id(std::move(sent)));
      };
      const std::uint16_t about = from_parent ? header.worker : job.name_of(handled.worker);
      for (std::uint16_t to = 0; to < job.config().workers; ++to) {
        if (from_parent || to != handled.worker) tell(to, protocol::CallDescriptor::of(header), about);
      }
      if (!from_parent) tell(handled.worker, job.descriptor(handled.slot), job.name_of(handled.other));
      break;
    }
  }
}

Step StateTable::worker_step(Id machine, Id packet) {
  Step step;
  if (ended(machine)) {
    step.became = "ended before";
    step.next = machine;
    return step;
  }
  WorkerState state = workers_[machine];
  if (scope_.numbers > 0) {
    take_at_worker(state, Packet(packets_[packet]), step);
    if (step.broken.empty()) step.next = worker_id(std::move(state), step);
    return step;
  }
  if (!receive(state, packets_[packet], step) || !send(state, step)) return step;
  for (const TimedWorker& later : workers_[machine].later) {
    Step other;
    WorkerState late = workers_[machine];
    late.now = later;
    if (!receive(late, packets_[packet], other) || !send(late, other)) return other;
    if (key_of(late) != key_of(state) || other.became != step.became) {
      step.broken = "it depends on the worker's timers what an answer makes of it";
      return step;
    }
  }
  step.next = worker_id(std::move(state), step);
  return step;
}

Step StateTable::call(Id worker) {
  Step step;
  WorkerState state = workers_[worker];
  call(state, step);
  if (step.broken.empty()) step.next = worker_id(std::move(state), step);
  return step;
}

void StateTable::call(WorkerState& state, Step& step) {
  state.now.machine.start({.operation = state.called,
                           .elements = script_of(state.number)[state.called],
                           .wire = kernels::DType::i64,
                           .reduce = kernels::ReduceOp::sum});
  ++state.called;
  step.became = "called";
  send(state, step, [](std::uint64_t) { return false; });
}

Step StateTable::hear(Id worker) {
  Step step;
  WorkerState state = workers_[worker];
  state.ended = true;
  step.became = "ended";
  step.next = worker_id(std::move(state), step);
  return step;
}

bool StateTable::receive(WorkerState& worker, const Packet& packet, Step& step) const {
  const auto received = worker.now.machine.handle_packet(packet.bytes, worker.now.now_ns);
  switch (received.outcome) {
    case Worker::Outcome::dropped:
      step.became = dropped(received.drop);
      return true;
    case Worker::Outcome::mismatch:
      return end(worker, received.header, step);
    case Worker::Outcome::received:
      return take(worker, received, step);
    case Worker::Outcome::nack:
      step.became = "told of a loss";
      return true;
  }
  return false;
}

bool StateTable::end(WorkerState& worker, const Header& said, Step& step) const {
  const Script& line = script_of(worker.number);
  const std::uint32_t own = operation_at(line, said.chunk);
  step.became = "ended: mismatch";
  if (agreed(said.chunk)) {
    step.broken = "workers that agree are said not to";
  } else if (own < line.size() && said.operation == own && said.elements == line[own]) {
    step.broken = "a worker is told that another differs, which said the same";
  }
  worker.ended = true;
  return step.broken.empty();
}

bool StateTable::take(WorkerState& worker, const Worker::Received& received, Step& step) const {
  const Script& line = script_of(worker.number);
  const std::uint64_t chunk = place(line, received.header.operation, received.first);
  std::int64_t value = 0;
  if (chunk == chunk_count_ || received.values.size() != sizeof value) {
    step.broken = "a worker is given values of no chunk";
    return false;
  }
  std::memcpy(&value, received.values.data(), sizeof value);
  step.became = "received";
  const std::uint64_t bit = std::uint64_t{1} << chunk;
  if (!agreed(chunk)) {
    step.broken = "a worker is given a sum of chunk " + std::to_string(chunk) + ", on which workers disagree";
  } else if (worker.received & bit) {
    step.broken = "a worker is given chunk " + std::to_string(chunk) + " twice";
  } else if (value != result(worker.root_generation, chunk)) {
    step.broken = "a worker is given a wrong sum of chunk " + std::to_string(chunk) + ":" + taken_apart(value);
  }
  worker.received |= bit;
  if (scope_.numbers > 0) worker.numbers.take_result(chunk, received.header.packet_number);
  return step.broken.empty();
}

bool StateTable::send(WorkerState& worker, Step& step, const Allowed& allowed) {
  const std::uint16_t index = worker.number;
  if (worker.ended) return true;
  // Every chunk there is, and a window of those given up: more than any worker ever sends at once.
  for (std::uint64_t left = (chunk_count_ + scope_.window + 1) * std::max(1U, scope_.numbers);
       const auto send = worker.now.machine.poll_send(worker.now.now_ns);) {
    Header header = send->header;
    const std::uint64_t chunk = place(script_of(index), header.operation, send->first);
    if (chunk == chunk_count_ || send->count != 1 || --left == 0) {
      step.broken = left == 0 ? "a worker sends without end" : "a worker sends values of no chunk";
      return false;
    }
    if (scope_.numbers == 0) {
      header.packet_number = 0;
    } else if (header.packet_number % scope_.numbers != 0) {
      worker.now.machine.not_sent(header.chunk);
      continue;
    } else if (!number(worker, chunk, header.packet_number, send->again, allowed, step)) {
      return false;
    }
    Packet packet{.worker = index, .chunk = header.chunk, .generation = worker.generation()};
    packet.bytes.resize(protocol::kHeaderBytes + kPayloadBytes);
    protocol::write_header(header, packet.bytes.data());
    const std::int64_t value = contribution(worker.root_generation, index, chunk);
    std::memcpy(packet.bytes.data() + protocol::kHeaderBytes, &value, sizeof value);

    const std::size_t known = packets_.size();
    const Id id = packet_id(std::move(packet));
    const std::uint64_t bit = std::uint64_t{1} << chunk;
    if (scope_.numbers == 0 && (worker.sent & bit) && id == known) {
      step.broken = "a worker sends chunk " + std::to_string(chunk) + " again, and not as it was";
      return false;
    }
    worker.sent |= bit;
    step.sent.push_back(id);
  }
  return true;
}

// As if all of its timers rang, one after the other.
Id StateTable::worker_id(WorkerState state, Step& step) {
  const auto [at, added] = worker_ids_.try_emplace(key_of(state), static_cast<Id>(workers_.size()));
  if (!added) return at->second;
  state.later.clear();
  WorkerState late = state;
  Step resent;
  for (std::uint32_t timeouts = state.ended || scope_.numbers > 0 ? 0 : state.now.machine.in_flight(); timeouts > 0;
       --timeouts) {
    late.now.now_ns = std::max(late.now.now_ns, late.now.machine.poll_timeout());
    late.now.machine.handle_timeout(late.now.now_ns);
    state.later.push_back(late.now);  // given up, and not yet sent again
    if (!send(late, resent) || late.sent != state.sent) {
      step.broken = resent.broken.empty() ? "a timer sends what was never sent" : resent.broken;
      worker_ids_.erase(at);
      return kNoId;
    }
    state.later.push_back(late.now);
  }
  state.again = resent.sent;
  workers_.push_back(std::move(state));
  worker_steps_.emplace_back();
  return at->second;
}

Id StateTable::switch_id(SwitchState state) {
  if (scope_.numbers > 0 && state.gap_detectors.empty()) {
    state.gap_detectors.resize(state.machine.config().workers);
    state.came.resize(state.machine.config().workers);
    if (state.leaf != SwitchState::kRoot) state.sender = protocol::ParentSender(state.machine.slot_count());
  }
  std::vector<std::byte> bytes;
  state.machine.append_canonical(bytes);
  Key key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  append(key, state.restarts);
  append(key, state.leaf);
  append(key, state.leaves);
  for (const std::uint64_t came : state.came) append(key, came);
  state.numbers.append_canonical(key);
  append(key, state.asked);
  bytes.clear();
  state.sender.append_canonical(bytes);
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto [at, added] = switch_ids_.try_emplace(std::move(key), static_cast<Id>(switches_.size()));
  if (added) {
    switches_.push_back(std::move(state));
    switch_steps_.emplace_back();
  }
  return at->second;
}

StateTable::Key StateTable::key_of(const WorkerState& worker) const {
  const Worker& machine = worker.now.machine;
  Key key;
  append(key, worker.number);
  append(key, worker.generation());
  append(key, worker.root_generation);
  if (worker.ended) return key;  // nothing of it matters any more
  append(key, worker.called);
  append(key, worker.sent);
  append(key, worker.received);
  append(key, machine.oldest_outstanding());
  append(key, machine.in_flight());
  append(key, machine.sendable());
  append(key, machine.congestion_window());
  append(key, machine.idle());
  if (scope_.numbers == 0) return key;
  // All of it: what it sends again has a number.
  std::vector<std::byte> bytes;
  machine.append_canonical(bytes);
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  worker.numbers.append_canonical(key);
  append(key, worker.timeouts);
  append(key, worker.now.now_ns);
  return key;
}

Id StateTable::packet_id(Packet packet) {
  Key key(reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size());
  append(key, packet.worker);
  append(key, packet.leaf);
  const auto [at, added] = packet_ids_.try_emplace(std::move(key), static_cast<Id>(packets_.size()));
  if (added) packets_.push_back(std::move(packet));
  return at->second;
}

Id StateTable::network_of(std::vector<Id> packets) {
  Key key(reinterpret_cast<const char*>(packets.data()), packets.size() * sizeof(Id));
  const auto [at, added] = network_ids_.try_emplace(std::move(key), static_cast<Id>(networks_.size()));
  if (added) networks_.push_back(std::move(packets));
  return at->second;
}

Id StateTable::with(Id network, const std::vector<Id>& sent) {
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

Id StateTable::without(Id network, Id packet) {
  std::vector<Id> packets = networks_[network];
  std::erase(packets, packet);
  return network_of(std::move(packets));
}

const StateTable::Script& StateTable::script_of(std::uint16_t worker) const {
  return !scope_.last.empty() && worker + 1 == scope_.workers ? scope_.last : scope_.operations;
}

std::uint32_t StateTable::operation_at(const Script& line, std::uint64_t chunk) {
  std::uint32_t operation = 0;
  while (operation < line.size() && chunk >= line[operation]) chunk -= line[operation++];
  return operation;
}

bool StateTable::agreed(std::uint64_t chunk) const {
  if (scope_.last.empty()) return true;
  const std::uint32_t usual = operation_at(scope_.operations, chunk);
  const std::uint32_t other = operation_at(scope_.last, chunk);
  return usual == other && usual < scope_.operations.size() && other < scope_.last.size() &&
         scope_.operations[usual] == scope_.last[other];
}

std::uint64_t StateTable::place(const Script& line, std::uint32_t operation, std::uint64_t first) const {
  if (operation >= line.size() || first >= line[operation]) return chunk_count_;
  return std::accumulate(line.begin(), line.begin() + operation, first);
}

std::int64_t StateTable::contribution(Generation generation, std::uint16_t worker, std::uint64_t chunk) const {
  const std::uint64_t number = (generation.incarnation - 1) * kGenerations + (generation.epoch - 1);
  static_assert(kGenerations * kGenerations * kMaxChunks <= kNumbers);
  return (kNumbers + static_cast<std::int64_t>(number * kMaxChunks + chunk)) << (kWorkerBits * worker);
}

std::string StateTable::taken_apart(std::int64_t sum) const {
  std::string parts;
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) {
    const std::int64_t number = (sum >> (kWorkerBits * worker) & 0xffff) - kNumbers;
    parts += (worker == 0 ? " worker " : ", worker ") + std::to_string(worker);
    if (number < 0) {
      parts += " nothing";
    } else if (number >= kNumbers) {
      parts += " several";
    } else {
      const auto generation = static_cast<std::uint32_t>(number / kMaxChunks);
      parts += " chunk " + std::to_string(number % kMaxChunks) + " of " +
               text_of({generation / kGenerations + 1, generation % kGenerations + 1});
    }
  }
  return parts;
}

std::int64_t StateTable::result(Generation generation, std::uint64_t chunk) const {
  std::int64_t sum = 0;
  for (std::uint16_t worker = 0; worker < scope_.workers; ++worker) sum += contribution(generation, worker, chunk);
  return sum;
}

}  // namespace netfold::model_check
