// Packets with their numbers: gap detection, NACKs and a leaf's sender, and what is asked of them.
#include "state_table.hpp"

#include <algorithm>
#include <deque>

namespace netfold::model_check {

using protocol::Header;
using protocol::Worker;

void SentNumbers::take_result(std::uint64_t chunk, std::uint64_t number) {
  received |= std::uint64_t{1} << chunk;
  results |= std::uint64_t{1} << (number - 1);
  skipped |= (results & (results + 1)) != 0;
  answered = std::max(answered, sent[chunk]);
}

void SentNumbers::append_canonical(std::string& out) const {
  const auto append = [&out](const auto& value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
  append(sent);
  append(newest);
  append(answered);
  append(results);
  append(received);
  append(skipped);
}

// The switch's half of finding losses, as the aggregator has it (native/dataplane/data_plane.cpp).
void StateTable::note_number(SwitchState& state, const Header& header, Step& step) {
  const std::uint64_t bit = std::uint64_t{1} << header.packet_number / scope_.numbers;
  const auto gap = state.gap_detectors[header.worker].observe(header.packet_number);
  std::uint64_t& came = state.came[header.worker];
  came |= bit;
  if (gap.count == 0) return;
  const std::uint64_t last = gap.first + gap.count - 1;
  const auto has_come = [&](std::uint64_t number) {
    return number % scope_.numbers == 0 && (came >> number / scope_.numbers & 1) != 0;
  };
  if (last + protocol::kReorderThreshold > header.packet_number || has_come(gap.first) || has_come(last)) {
    step.broken = "a packet is named as missing that is not";
    return;
  }
  // Of numbers alone whose packets never left: no sender has anything under them.
  if (last / scope_.numbers == (gap.first - 1) / scope_.numbers) return;
  Packet sent = answer_to(state, header.worker);
  sent.nack = true;
  sent.chunk = gap.first;
  sent.generation = state.generation();
  sent.bytes.resize(state.machine.packet_bytes());
  state.machine.write_nack(header.worker, gap, 0, sent.bytes.data());  // its number is a nonce
  step.sent.push_back(packet_id(std::move(sent)));
}

void StateTable::send_sums(SwitchState& state, const Allowed& allowed, Step& step) {
  SentNumbers& numbers = state.numbers;
  while (const auto send = state.sender.poll_send()) {
    if (send->packet_number % scope_.numbers != 0) {
      state.sender.not_sent(send->slot);
      continue;
    }
    const auto sum = state.machine.sum(send->slot, send->packet_number);
    const std::uint64_t chunk = protocol::PacketView::parse(sum)->header().chunk;
    if (send->packet_number <= numbers.newest || send->packet_number / scope_.numbers >= kMaxNumbers) {
      step.broken = "a leaf's packet has a number that another had, or there is no end of them";
      return;
    }
    if (numbers.sent[chunk] != 0 && !allowed(numbers.sent[chunk])) {
      step.broken = "a leaf sends a sum again that nobody misses";
      return;
    }
    numbers.newest = numbers.sent[chunk] = send->packet_number;
    step.sent.push_back(packet_id({.leaf = true,
                                   .worker = state.leaf,
                                   .chunk = chunk,
                                   .generation = state.root_generation(),
                                   .bytes = {sum.begin(), sum.end()}}));
  }
}

StateTable::Allowed StateTable::allowed_by(const Packet& packet, const SentNumbers& numbers, bool rang) const {
  if (packet.nack) {
    const Header header = protocol::PacketView::parse(packet.bytes)->header();
    return [=](std::uint64_t number) { return number >= header.chunk && number - header.chunk < header.elements; };
  }
  // Passed over by the result of one that was sent later, where a result was missing at some time; or overdue.
  return [=](std::uint64_t number) {
    return number + protocol::kReorderThreshold <= numbers.answered && (numbers.skipped || rang);
  };
}

bool StateTable::heeded(const Packet& nack, const SentNumbers& before, const SentNumbers& after) const {
  const Allowed named = allowed_by(nack, before, false);
  for (std::uint64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    const std::uint64_t number = before.sent[chunk];
    if (number != 0 && named(number) && (before.received >> chunk & 1) == 0 && after.sent[chunk] == number)
      return false;
  }
  return true;
}

void StateTable::take_at_worker(WorkerState& state, const Packet& packet, Step& step) {
  const SentNumbers before = state.numbers;
  if (!receive(state, packet, step)) return;
  const bool belongs = packet.generation == state.generation();  // what is of a former generation says nothing
  const Allowed none = [](std::uint64_t) { return false; };
  if (!send(state, step, belongs ? allowed_by(packet, state.numbers, state.timeouts > 0) : none)) return;
  if (packet.nack && belongs && !heeded(packet, before, state.numbers)) {
    step.broken = "a worker does not send again what a NACK names";
  }
}

bool StateTable::can_time_out(Id worker) const {
  const WorkerState& state = workers_[worker];
  return state.timeouts < scope_.timeouts && state.now.machine.in_flight() > 0;
}

Step StateTable::timeout(Id worker) {
  Step step;
  WorkerState state = workers_[worker];
  timeout(state, step);
  if (step.broken.empty()) step.next = worker_id(std::move(state), step);
  return step;
}

void StateTable::timeout(WorkerState& state, Step& step) {
  Worker& machine = state.now.machine;
  const bool probed = machine.probe_results() > 0;
  state.now.now_ns = std::max(state.now.now_ns, machine.poll_timeout());
  machine.handle_timeout(state.now.now_ns);
  ++state.timeouts;
  step.became = "timer";
  const std::size_t sent = step.sent.size();
  if (!send(state, step, [](std::uint64_t) { return true; })) return;
  // After a probe's answer there may be nothing that is overdue.
  if (!probed && step.sent.size() == sent) step.broken = "a timer sends nothing";
}

// Who is of a former generation joins again. Whatever was sent is lost but what is sent from here on, which arrives, in
// order.
std::string StateTable::broken_alone(Id machine, std::vector<Id> leaves, const std::vector<Id>& workers) {
  std::vector<SwitchState> switches;
  std::vector<WorkerState> states;
  for (std::uint16_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (switches_[leaves[leaf]].root_generation() != switches_[machine].generation())
      leaves[leaf] = new_leaf(machine, leaf);
    switches.push_back(switches_[leaves[leaf]]);
  }
  switches.push_back(switches_[machine]);
  for (std::uint16_t worker = 0; worker < workers.size(); ++worker) {
    const Id at = leaves.empty() ? machine : leaves[leaf_of(worker)];
    const bool rejoins = workers_[workers[worker]].generation() != switches_[at].generation();
    states.push_back(workers_[rejoins ? new_worker(at, worker) : workers[worker]]);
  }
  std::deque<Id> due;
  std::string broken;
  const auto end = [&](const Step& step) {
    due.insert(due.end(), step.sent.begin(), step.sent.end());
    broken = step.broken;
    return broken.empty();
  };
  const auto is_over = [&](const WorkerState& state) {
    return state.called == script_of(state.number).size() && state.now.machine.idle();
  };
  // A timer a worker each time, each of which ends one loss at least.
  for (std::uint64_t round = 0; round < 4 * (chunk_count_ + 1); ++round) {
    for (WorkerState& state : states) {
      Step step;
      if (state.called < script_of(state.number).size()) {
        call(state, step);
      } else if (state.now.machine.in_flight() > 0) {
        timeout(state, step);
      }
      if (!end(step)) return broken;
    }
    while (!due.empty()) {
      const Packet packet = packets_[due.front()];
      due.pop_front();
      Step step;
      if (packet.from_switch && !packet.leaf) {
        take_at_worker(states[packet.worker], packet, step);
      } else {
        const bool to_root = leaves.empty() || (packet.leaf && !packet.from_switch);
        const std::size_t leaf = packet.leaf ? packet.worker : leaves.empty() ? 0 : leaf_of(packet.worker);
        take_at_switch(to_root ? switches.back() : switches[leaf], packet, step);
      }
      if (!end(step)) return broken;
    }
    if (std::ranges::all_of(states, is_over)) return {};
  }
  return "from here, with everything lost, no retransmission leads to where all have finished";
}

// A packet has that number: what is asked of it, and what is remembered.
bool StateTable::number(WorkerState& worker, std::uint64_t chunk, std::uint64_t packet_number, bool again,
                        const Allowed& allowed, Step& step) const {
  SentNumbers& numbers = worker.numbers;
  std::uint64_t& last = numbers.sent[chunk];
  if (packet_number <= numbers.newest || packet_number / scope_.numbers >= kMaxNumbers) {
    step.broken = "a worker's packet has a number that another had, or there is no end of them";
  } else if (again != (last != 0)) {
    step.broken = "a worker takes a chunk for one that was sent before, or the other way round";
  } else if (again && !allowed(last)) {
    step.broken = "a worker sends a chunk again that nobody misses";
  }
  numbers.newest = last = packet_number;
  return step.broken.empty();
}

}  // namespace netfold::model_check
