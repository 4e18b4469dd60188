#include <netfold/device/host_staging.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace netfold::device {

using transport::now_ns;

namespace {

constexpr std::int64_t kShortestTimeoutNs = 1'000'000;
constexpr const char* kToHost = "the copy to the host";
constexpr const char* kToDevice = "the copy to the device";

std::size_t aligned(std::size_t bytes) {
  return (bytes + HostStaging::kAlignBytes - 1) / HostStaging::kAlignBytes * HostStaging::kAlignBytes;
}

}  // namespace

HostStaging::HostStaging(std::shared_ptr<engine::Group> group, std::shared_ptr<CudaDriver> driver, StreamHandle out,
                         StreamHandle back, const std::vector<collective::Buffer>& slots)
    : group_(std::move(group)), driver_(std::move(driver)), out_(out), back_(back) {
  if (slots.empty()) throw std::invalid_argument("staging needs a slot");
  slot_bytes_ = slots.front().bytes;
  for (const auto& memory : slots) slots_.push_back({memory, nullptr});
}

std::uint64_t HostStaging::begin(Request request) {
  if (call_ != nullptr) throw std::logic_error("the chunks of the call before have not all left");
  if (request.chunks == 0 || request.elements == 0) throw std::invalid_argument("a call has at least one chunk");
  std::size_t needed = 0;
  for (const auto* tensors : {&request.inputs, &request.outputs}) {
    for (const Tensor& each : *tensors) needed += aligned(std::min(request.elements * each.element_bytes, each.bytes));
  }
  if (needed > slot_bytes_) {
    throw std::invalid_argument("a chunk of " + std::to_string(needed) + " bytes does not fit into a slot of " +
                                std::to_string(slot_bytes_));
  }
  driver_->make_current();
  driver_->wait(out_, request.ready);
  call_ = std::make_shared<CallState>(CallState{std::move(request), ++calls_});
  next_chunk_ = 0;
  return calls_;
}

HostStaging::Outcome HostStaging::run(Goal goal, std::int64_t interrupts) {
  Outcome outcome;
  Waiting waiting;
  bool moved = false;
  try {
    driver_->make_current();
    for (;;) {
      if (goal == Goal::returned && interrupts != kNever && interrupts_ != interrupts) goal = Goal::left;
      outcome.reached = is_reached(goal) || (goal == Goal::moved && moved);
      if (outcome.reached || outcome.fault || !outcome.finished.empty()) return outcome;
      if (advance(outcome)) {
        waiting = {};
        moved = true;
      } else {
        wait(outcome, waiting);
      }
    }
  } catch (const CudaError& error) {
    std::string text = action_.what;
    if (action_.chunks != 0) {
      text += " of " + std::to_string(action_.bytes) + " bytes (chunk " + std::to_string(action_.index + 1) + " of " +
              std::to_string(action_.chunks) + ")";
    }
    outcome.fault = {.kind = Fault::Kind::device, .number = action_.number, .text = text + ": " + error.what()};
    return outcome;
  }
}

void HostStaging::forget() {
  call_.reset();
  leaving_.clear();
  const std::int64_t give_up_ns = now_ns() + kForgetNs;
  for (const Chunk& chunk : running_) {
    chunk.operation->wait(std::max<std::int64_t>(0, give_up_ns - now_ns()));
  }
  running_.clear();
}

bool HostStaging::is_reached(Goal goal) const {
  switch (goal) {
    case Goal::left:
      return call_ == nullptr;
    case Goal::submitted:
      return call_ == nullptr && leaving_.empty();
    case Goal::returned:
    case Goal::moved:
      return !busy();
  }
  return true;
}

// Moves one chunk to its next stage. False: none can move now.
bool HostStaging::advance(Outcome& outcome) {
  if (!running_.empty() && running_.front().operation->done()) {
    Chunk chunk = std::move(running_.front());
    running_.pop_front();
    finish(std::move(chunk), outcome);
    return true;
  }
  if (call_ != nullptr && !slots_.empty()) {
    leave();
    return true;
  }
  if (leaving_.empty() || !is_ready(leaving_.front())) return false;
  Chunk chunk = std::move(leaving_.front());
  leaving_.pop_front();
  submit(std::move(chunk));
  return true;
}

void HostStaging::wait(Outcome& outcome, Waiting& waiting) {
  if (leaving_.empty()) {
    group_->wait(*running_.front().operation, -1);  // its own deadline ends the wait
    return;
  }
  const std::int64_t now = now_ns();
  if (waiting.queries++ == 0) waiting.began_ns = now;
  if (waiting.queries < kSpinQueries) return;
  const CallState& call = *leaving_.front().of;
  if (now > call.request.deadline_ns) {
    outcome.fault = {
        .kind = Fault::Kind::overdue, .number = call.number, .text = action_.what, .waited_ns = now - waiting.began_ns};
    return;
  }
  waiting.pause_ns = std::min(std::max(2 * waiting.pause_ns, kShortestPauseNs), kLongestPauseNs);
  if (!running_.empty()) {
    running_.front().operation->wait(waiting.pause_ns);
  } else if (group_->failure()) {
    outcome.fault = {.kind = Fault::Kind::group, .number = call.number};
  } else {
    std::this_thread::sleep_for(std::chrono::nanoseconds(waiting.pause_ns));
  }
}

void HostStaging::leave() {
  Chunk chunk{.of = call_, .index = next_chunk_, .slot = std::move(slots_.front())};
  slots_.pop_front();
  const Request& request = call_->request;
  std::size_t at = 0;
  const auto place = [&](const std::vector<Tensor>& tensors, std::vector<Part>& parts) {
    for (const Tensor& tensor : tensors) {
      const std::size_t begin = std::min(chunk.index * request.elements * tensor.element_bytes, tensor.bytes);
      const std::size_t bytes = std::min(request.elements * tensor.element_bytes, tensor.bytes - begin);
      parts.push_back({tensor.address + begin, {chunk.slot.memory.data + at, bytes}});
      at += aligned(bytes);
    }
  };
  place(request.inputs, chunk.inputs);
  place(request.outputs, chunk.outputs);
  const bool leaves = (request.of_inputs.to_host && !request.inputs.empty()) ||
                      (request.of_outputs.to_host && !request.outputs.empty());
  if (leaves) {
    if (chunk.slot.free != nullptr) chunk.slot.free->hold(out_);
    copy(chunk, true);
    chunk.left = driver_->record(out_);
  }
  leaving_.push_back(std::move(chunk));
  if (++next_chunk_ == request.chunks) call_.reset();
}

bool HostStaging::is_ready(Chunk& chunk) {
  const CallState& call = *chunk.of;
  // The collective overwrites the slot, so the copy back of the slot's previous chunk must be done, too.
  for (auto [event, what] : {std::pair(&chunk.slot.free, kToDevice), std::pair(&chunk.left, kToHost)}) {
    if (*event == nullptr) continue;
    action_ = {.what = what, .number = call.number};
    if (!(*event)->passed()) return false;
    event->reset();
  }
  return true;
}

void HostStaging::submit(Chunk chunk) {
  const Request& request = chunk.of->request;
  collective::Call call = request.call;
  for (const Part& part : chunk.inputs) call.inputs.push_back(part.region);
  for (const Part& part : chunk.outputs) call.outputs.push_back(part.region);
  const std::int64_t timeout_ns = std::max(kShortestTimeoutNs, request.deadline_ns - now_ns());
  chunk.operation = group_->submit(std::move(call), timeout_ns, false);
  running_.push_back(std::move(chunk));
}

// Copies the results of a chunk back, and frees its slot.
void HostStaging::finish(Chunk chunk, Outcome& outcome) {
  CallState& call = *chunk.of;
  const Request& request = call.request;
  if (chunk.operation->failure()) {
    outcome.fault = {
        .kind = Fault::Kind::operation, .number = call.number, .text = {}, .operation = std::move(chunk.operation)};
    return;
  }
  const bool returns = (request.of_inputs.to_device && !request.inputs.empty()) ||
                       (request.of_outputs.to_device && !request.outputs.empty());
  if (returns) {
    // Not at `begin`: copies of an earlier call may still come in this stream, and `ready` may wait for them.
    if (!call.back_waits) driver_->wait(back_, request.ready);
    call.back_waits = true;
    copy(chunk, false);
    chunk.slot.free = driver_->record(back_);
  }
  slots_.push_back(chunk.slot);
  if (chunk.index + 1 < request.chunks) return;
  outcome.finished.push_back({call.number, returns ? chunk.slot.free : driver_->record(back_)});
}

void HostStaging::copy(const Chunk& chunk, bool to_host) {
  const Request& request = chunk.of->request;
  action_ = {.what = to_host ? kToHost : kToDevice,
             .number = chunk.of->number,
             .index = chunk.index,
             .chunks = request.chunks};
  for (const auto& [parts, copies] :
       {std::pair(&chunk.inputs, request.of_inputs), std::pair(&chunk.outputs, request.of_outputs)}) {
    if (!(to_host ? copies.to_host : copies.to_device)) continue;
    for (const Part& part : *parts) {
      action_.bytes = part.region.bytes;
      if (part.region.bytes == 0) continue;
      if (to_host) {
        driver_->copy_to_host(out_, part.region.data, part.address, part.region.bytes);
      } else {
        driver_->copy_to_device(back_, part.address, part.region.data, part.region.bytes);
      }
    }
  }
}

}  // namespace netfold::device
