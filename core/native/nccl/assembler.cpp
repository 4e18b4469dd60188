#include "assembler.hpp"

#include <netfold/nccl/profiler_interface.hpp>

#include <algorithm>

#include "names.hpp"

namespace netfold::nccl {
namespace {

bool is_call(std::int32_t type) {
  return (type & (event_type::kGroupApi | event_type::kCollectiveApi | event_type::kPointToPointApi)) != 0;
}

bool is_operation(std::int32_t type) {
  return (type & (event_type::kCollective | event_type::kPointToPoint | event_type::kCopyEngineCollective)) != 0;
}

template <class Map>
auto* find(Map& map, std::uint64_t id) {
  const auto found = map.find(id);
  return found == map.end() ? nullptr : &found->second;
}

}  // namespace

void Assembler::add(const Event& event) {
  switch (event.kind) {
    case Event::Kind::start:
      return start(event);
    case Event::Kind::stop:
      return stop(event);
    case Event::Kind::state:
      return state(event);
    case Event::Kind::comm_ended:
      ended_comms_.push_back(event.comm);
      return;
  }
}

void Assembler::start(const Event& event) {
  if (calls_.size() + operations_.size() + transfers_.size() + steps_.size() + others_.size() >= kMostOpen) {
    ++refused;
    return;
  }
  Open open{event.type, event.comm, event.parent, event.at_ns, event.at_ns};
  if (is_call(event.type)) {
    calls_[event.id] = open;
  } else if (is_operation(event.type)) {
    Operation made;
    OperationRecord& record = made.record;
    record.id = event.id;
    record.count = event.value;
    record.submitted_ns = record.ended_ns = event.at_ns;
    record.sequence = event.sequence;
    record.comm = event.comm;
    record.peer = event.peer;
    record.channels = event.channels;
    record.function = event.function;
    record.dtype = event.dtype;
    record.algorithm = event.algorithm;
    record.protocol = event.protocol;
    made.touched_ns = event.at_ns;
    made.kernels_asked = event.type == event_type::kCollective ? event.channels : 0;
    if (const Open* call = find(calls_, event.parent)) {
      record.called_ns = call->began_ns;
      made.group = call->parent;
      find_launch(made);
    }
    operations_.emplace(event.id, made);
  } else if (event.type == event_type::kProxyOperation) {
    Transfer made;
    made.record.operation = event.parent;
    made.record.began_ns = event.at_ns;
    made.record.comm = event.comm;
    made.record.peer = event.peer;
    made.record.channel = event.channels;
    made.record.is_send = event.is_send ? 1 : 0;
    transfers_.emplace(event.id, made);
    begin_under(event.parent, event);
    if (Operation* operation = find(operations_, event.parent)) ++operation->record.transfers;
  } else if (event.type == event_type::kProxyStep) {
    steps_[event.id] = {.transfer = event.parent, .since_ns = event.at_ns};
  } else {
    if (event.type == event_type::kKernelChannel) {
      begin_under(event.parent, event);
      if (Operation* operation = find(operations_, event.parent); operation != nullptr && event.value != 0) {
        auto& began_ns = operation->record.gpu_began_ns;
        began_ns = began_ns == 0 ? event.value : std::min(began_ns, event.value);
      }
    } else if (event.type == event_type::kNetPlugin) {
      if (const Step* step = find(steps_, event.parent)) {
        if (Transfer* transfer = find(transfers_, step->transfer)) {
          ++transfer->record.net_requests;
          if (event.is_send) transfer->record.net_bytes += event.value;
          open.parent = step->transfer;
        }
      }
    }
    others_[event.id] = open;
  }
}

void Assembler::state(const Event& event) {
  if (Step* step = find(steps_, event.id)) {
    leave_state(*step, event.at_ns);
    step->state = event.type;
    step->bytes = std::max(step->bytes, event.value);
  } else if (const Open* other = find(others_, event.id)) {
    if (other->type == event_type::kKernelChannel && event.type == event_state::kKernelStop) {
      if (Operation* operation = find(operations_, other->parent)) {
        auto& ended_ns = operation->record.gpu_ended_ns;
        ended_ns = std::max(ended_ns, event.value);
      }
    } else if (other->type == event_type::kNetPlugin && event.type == event_state::kNetUpdate) {
      if (Transfer* transfer = find(transfers_, other->parent); transfer != nullptr && transfer->record.is_send == 0) {
        transfer->record.net_bytes += event.value;
      }
    }
  } else if (find(transfers_, event.id) == nullptr && find(operations_, event.id) == nullptr &&
             find(calls_, event.id) == nullptr) {
    ++unknown;
  }
}

void Assembler::stop(const Event& event) {
  if (Open* call = find(calls_, event.id)) {
    call->has_stopped = true;
    call->touched_ns = event.at_ns;
  } else if (Operation* operation = find(operations_, event.id)) {
    operation->stopped_ns = operation->touched_ns = event.at_ns;
    find_launch(*operation);
    if (operation->record.began_ns == 0) operation->record.ended_ns = event.at_ns;
  } else if (Step* step = find(steps_, event.id)) {
    leave_state(*step, event.at_ns);
    if (Transfer* transfer = find(transfers_, step->transfer)) {
      ++transfer->record.steps;
      transfer->record.bytes += step->bytes;
    }
    steps_.erase(event.id);
  } else if (find(transfers_, event.id) != nullptr) {
    write_transfer(event.id, event.at_ns, false);
  } else if (const Open* other = find(others_, event.id)) {
    if (other->type == event_type::kKernelChannel) {
      if (Operation* of = find(operations_, other->parent)) ++of->kernels;
      end_under(other->parent, event.at_ns);
    } else if (other->type == event_type::kKernelLaunch) {
      launches_[other->parent] = event.at_ns;
    } else if (Transfer* transfer = find(transfers_, other->parent)) {
      transfer->record.net_ns += event.at_ns - other->began_ns;
    }
    others_.erase(event.id);
  } else {
    ++unknown;
  }
}

void Assembler::begin_under(std::uint64_t id, const Event& event) {
  Operation* operation = find(operations_, id);
  if (operation == nullptr) return;
  ++operation->open;
  operation->touched_ns = event.at_ns;
  if (operation->record.began_ns == 0) operation->record.began_ns = event.at_ns;
}

void Assembler::end_under(std::uint64_t id, std::int64_t at_ns) {
  Operation* operation = find(operations_, id);
  if (operation == nullptr) return;
  if (operation->open > 0) --operation->open;
  operation->touched_ns = operation->record.ended_ns = at_ns;
}

void Assembler::leave_state(Step& step, std::int64_t at_ns) {
  if (Transfer* transfer = find(transfers_, step.transfer)) {
    const std::int64_t passed_ns = at_ns - step.since_ns;
    switch (step.state) {
      case event_state::kSendGpuWait:
      case event_state::kReceiveGpuWait:
      case event_state::kReceiveFlushWait:
        transfer->record.gpu_wait_ns += passed_ns;
        break;
      case event_state::kSendPeerWait:
        transfer->record.peer_wait_ns += passed_ns;
        break;
      case event_state::kSendWait:
      case event_state::kReceiveWait:
        transfer->record.network_ns += passed_ns;
        break;
      default:
        break;
    }
  }
  step.since_ns = at_ns;
}

void Assembler::write_transfer(std::uint64_t id, std::int64_t at_ns, bool is_cut_off) {
  TransferRecord record = transfers_.at(id).record;
  record.ended_ns = at_ns;
  record.is_cut_off = is_cut_off ? 1 : 0;
  if (Operation* operation = find(operations_, record.operation)) {
    (record.is_send != 0 ? operation->record.sent_bytes : operation->record.received_bytes) += record.bytes;
  }
  if (!is_cut_off) end_under(record.operation, at_ns);
  transfers.push_back(record);
  transfers_.erase(id);
}

// The kernel's launch may come before the operation's submission or after it.
void Assembler::find_launch(Operation& operation) const {
  if (const std::int64_t* launched = find(launches_, operation.group)) operation.record.launched_ns = *launched;
}

bool Assembler::has_ended(const Operation& operation, std::int64_t now_ns) const {
  if (operation.stopped_ns == 0 || operation.open > 0 || now_ns - operation.touched_ns < kQuietNs) return false;
  if (operation.record.algorithm == kCopyEngine) return true;  // NCCL says nothing else of it
  // No version says reliably how many channels a message has.
  return operation.kernels >= std::max(operation.kernels_asked, 1U);
}

void Assembler::write(Operation& operation) {
  OperationRecord& record = operation.record;
  find_launch(operation);
  if (operation.stopped_ns == 0 || operation.open > 0 ||
      (operation.kernels > 0 && operation.kernels < operation.kernels_asked)) {
    record.ending = Ending::cut_off;
  } else if (operation.kernels > 0) {
    record.ending = Ending::kernel;
  } else {
    record.ending = record.began_ns != 0 ? Ending::transfers : Ending::submission;
  }
  operations.push_back(record);
}

void Assembler::settle(std::int64_t now_ns, bool everything) {
  const auto is_over = [&](std::uint32_t comm) {
    return everything || std::ranges::find(ended_comms_, comm) != ended_comms_.end();
  };
  std::vector<std::uint64_t> ended;
  for (const auto& [id, transfer] : transfers_) {
    if (is_over(transfer.record.comm) || now_ns - transfer.record.began_ns > kMostOpenNs) ended.push_back(id);
  }
  for (const std::uint64_t id : ended) write_transfer(id, now_ns, true);
  for (auto at = operations_.begin(); at != operations_.end();) {
    Operation& operation = at->second;
    const bool is_left = is_over(operation.record.comm) || now_ns - operation.touched_ns > kMostOpenNs;
    if (is_left || has_ended(operation, now_ns)) {
      write(operation);
      at = operations_.erase(at);
    } else {
      ++at;
    }
  }
  std::erase_if(steps_, [&](const auto& each) {
    return everything || transfers_.find(each.second.transfer) == transfers_.end();
  });
  std::erase_if(others_, [&](const auto& each) {
    return is_over(each.second.comm) || now_ns - each.second.touched_ns > kMostOpenNs;
  });
  std::erase_if(calls_, [&](const auto& each) {
    return everything || now_ns - each.second.touched_ns > (each.second.has_stopped ? kCallKeptNs : kMostOpenNs);
  });
  std::erase_if(launches_, [&](const auto& each) { return now_ns - each.second > kCallKeptNs; });
  ended_comms_.clear();
  std::ranges::sort(operations, {}, &OperationRecord::ended_ns);
}

}  // namespace netfold::nccl
