// Scopes with packet numbers: gap detection, NACKs and a leaf's sender, and the promises about them.
#include "state_table.hpp"

#include <algorithm>
#include <deque>

namespace netfold::model_check {

using protocol::Header;
using protocol::Worker;

void SentNumbers::record_result(std::uint64_t chunk, std::uint64_t number) {
  received |= std::uint64_t{1} << chunk;
  results |= std::uint64_t{1} << (number - 1);
  skipped |= (results & (results + 1)) != 0;
  answered = std::max(answered, sent[chunk]);
}

void SentNumbers::append_canonical(std::string& key) const {
  append(key, sent);
  append(key, newest);
  append(key, answered);
  append(key, results);
  append(key, received);
  append(key, skipped);
}

// As in core/native/dataplane/job_port.cpp.
void StateTable::observe_number(SwitchState& state, const Header& header, Step& step) {
  const auto gap = state.gap_detectors[header.worker].observe(header.packet_number);
  std::uint64_t& received = state.received[header.worker];
  received |= std::uint64_t{1} << header.packet_number / scope_.numbers;
  if (gap.count == 0) return;
  const std::uint64_t last = gap.first + gap.count - 1;
  const auto has_come = [&](std::uint64_t number) {
    return number % scope_.numbers == 0 && (received >> number / scope_.numbers & 1) != 0;
  };
  if (last + protocol::kReorderThreshold > header.packet_number || has_come(gap.first) || has_come(last)) {
    step.broken = "a NACK names a packet that does not count as missing";
    return;
  }
  // The packets of these numbers never left: the sender sends nothing again.
  if (last / scope_.numbers == (gap.first - 1) / scope_.numbers) return;
  Packet sent = answer_to(state, header.worker);
  sent.nack = true;
  sent.chunk = gap.first;
  sent.bytes.resize(state.job().packet_bytes());
  state.job().write_nack(header.worker, gap, 0, sent.bytes.data());  // the number is only a nonce
  step.sent.push_back(packet_id(std::move(sent)));
}

void StateTable::send_sums(SwitchState& state, const Allowed& allowed, Step& step) {
  SentNumbers& numbers = state.numbers;
  while (const auto send = state.sender.poll_send()) {
    if (send->packet_number % scope_.numbers != 0) {
      state.sender.not_sent(send->slot);
      continue;
    }
    const auto sum = state.job().sum(send->slot, send->packet_number);
    const std::uint64_t chunk = protocol::PacketView::parse(sum)->header().chunk;
    if (send->packet_number <= numbers.newest || send->packet_number / scope_.numbers >= kMaxNumbers) {
      step.broken = "a leaf reuses a packet number, or sends without end";
      return;
    }
    if (numbers.sent[chunk] != 0 && !allowed(numbers.sent[chunk])) {
      step.broken = "a leaf sends a sum again that is not missing";
      return;
    }
    numbers.newest = numbers.sent[chunk] = send->packet_number;
    send_sum(state, sum, step);
  }
}

StateTable::Allowed StateTable::allowed_by(const Packet& packet, const SentNumbers& numbers, bool timed_out) const {
  if (packet.nack) {
    const Header header = protocol::PacketView::parse(packet.bytes)->header();
    return [=](std::uint64_t number) { return number >= header.chunk && number - header.chunk < header.elements; };
  }
  // Passed over by the result of a later send, where a result was missing at some time, or after a timeout.
  return [=](std::uint64_t number) {
    return number + protocol::kReorderThreshold <= numbers.answered && (numbers.skipped || timed_out);
  };
}

bool StateTable::resends_named(const Packet& nack, const SentNumbers& before, const SentNumbers& after) const {
  const Allowed named = allowed_by(nack, before, false);
  for (std::uint64_t chunk = 0; chunk < script_.chunk_count(); ++chunk) {
    const std::uint64_t number = before.sent[chunk];
    const bool has_result = (before.received >> chunk & 1) != 0;
    if (number != 0 && named(number) && !has_result && after.sent[chunk] == number) return false;
  }
  return true;
}

void StateTable::receive_numbered(WorkerState& state, const Packet& packet, Step& step) {
  const SentNumbers before = state.numbers;
  if (!receive(state, packet, step)) return;
  const bool belongs = packet.generation == state.generation();  // packets of former generations allow nothing
  const Allowed none = [](std::uint64_t) { return false; };
  if (!send(state, step, belongs ? allowed_by(packet, state.numbers, state.timeouts > 0) : none)) return;
  if (packet.nack && belongs && !resends_named(packet, before, state.numbers)) {
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
  return finish(std::move(state), std::move(step));
}

void StateTable::timeout(WorkerState& state, Step& step) {
  Worker& machine = state.now.machine;
  const bool probed = machine.probe_results() > 0;
  state.now.now_ns = std::max(state.now.now_ns, machine.poll_timeout());
  machine.handle_timeout(state.now.now_ns);
  ++state.timeouts;
  step.became = "timeout";
  const std::size_t sent = step.sent.size();
  if (!send(state, step, [](std::uint64_t) { return true; })) return;
  // After an answered probe possibly no chunk is overdue.
  if (!probed && step.sent.size() == sent) step.broken = "a timeout sends nothing";
}

// Workers and leaves of a former generation join again. All packets so far are lost; later ones arrive in order.
std::string StateTable::broken_by_timeouts(Id machine, std::vector<Id> leaves, const std::vector<Id>& workers) {
  std::vector<SwitchState> switches;
  std::vector<WorkerState> states;
  for (std::uint16_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (switches_[leaves[leaf]].root_generation() != switches_[machine].generation()) {
      leaves[leaf] = new_leaf(machine, leaf);
    }
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
  const auto record = [&](const Step& step) {
    due.insert(due.end(), step.sent.begin(), step.sent.end());
    broken = step.broken;
    return broken.empty();
  };
  const auto has_called_all = [&](const WorkerState& state) {
    return state.called == script_.operations_of(state.index).size();
  };
  // Each round has one timeout per worker, which repairs one loss at least.
  for (std::uint64_t round = 0; round < 4 * (script_.chunk_count() + 1); ++round) {
    for (WorkerState& state : states) {
      Step step;
      if (!has_called_all(state)) {
        call(state, step);
      } else if (state.now.machine.in_flight() > 0) {
        timeout(state, step);
      }
      if (!record(step)) return broken;
    }
    while (!due.empty()) {
      const Packet& packet = packets_[due.front()];
      due.pop_front();
      Step step;
      if (packet.from_switch && !packet.leaf) {
        receive_numbered(states[packet.worker], packet, step);
      } else {
        const bool to_root = leaves.empty() || (packet.leaf && !packet.from_switch);
        const std::size_t leaf = packet.leaf ? packet.worker : leaves.empty() ? 0 : leaf_of(packet.worker);
        receive_at_switch(to_root ? switches.back() : switches[leaf], packet, step);
      }
      if (!record(step)) return broken;
    }
    const auto is_finished = [&](const WorkerState& state) {
      return has_called_all(state) && state.now.machine.idle();
    };
    if (std::ranges::all_of(states, is_finished)) return {};
  }
  return kStuck;
}

bool StateTable::check_number(WorkerState& worker, std::uint64_t chunk, std::uint64_t packet_number, bool again,
                              const Allowed& allowed, Step& step) const {
  SentNumbers& numbers = worker.numbers;
  std::uint64_t& last = numbers.sent[chunk];
  if (packet_number <= numbers.newest || packet_number / scope_.numbers >= kMaxNumbers) {
    step.broken = "a worker reuses a packet number, or sends without end";
  } else if (again != (last != 0)) {
    step.broken = "a worker marks a first send as a retransmission, or a retransmission as a first send";
  } else if (again && !allowed(last)) {
    step.broken = "a worker sends a chunk again that is not missing";
  }
  numbers.newest = last = packet_number;
  return step.broken.empty();
}

}  // namespace netfold::model_check
