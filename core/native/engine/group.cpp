#include <netfold/engine/group.hpp>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <netfold/collective/registry.hpp>
#include <netfold/engine/engine.hpp>
#include <netfold/engine/sampler.hpp>

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include "sleep.hpp"

namespace netfold::engine {

using collective::AlgorithmId;
using collective::Failure;

namespace {

// Sets default rounding and subnormals: a sum must not depend on the thread that adds, and a caller may have enabled
// flush-to-zero (torch.set_flush_denormal).
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  DefaultFloats() { std::fegetenv(&saved_), std::fesetenv(FE_DFL_ENV); }
  ~DefaultFloats() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

Interrupts interrupts;  // written once, before any thread waits

}  // namespace

Group::Group(Engine& engine, Options options, std::unique_ptr<transport::Mesh> mesh,
             std::unique_ptr<transport::Mesh> lane, std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes)
    : engine_(engine),
      options_(std::move(options)),
      mesh_(std::move(mesh)),
      hosts_(collective::make_host_map(options_.nodes, mesh_->rank())),
      transfers_(std::move(lane)),
      fallback_meshes_(std::move(fallback_meshes)),
      needs_progress_(mesh_->needs_progress()),
      status_(options_.id, options_.job, rank(), size()),
      wake_(transport::make_event()) {}

void Group::set_interrupts(Interrupts given) { interrupts = given; }

void Group::attach(std::unique_ptr<collective::Channel> channel, std::vector<collective::Choice> choices,
                   std::uint16_t table, bool hardware) {
  const auto inbox = inbox_.lock();
  if (hardware) beyond_profile_ = choices;
  inbox->traffic.push_back({.generation = channel->generation()});
  auto& fallback = *fallback_meshes_.at(switch_paths_.size());
  switch_paths_.push_back(
      std::make_unique<collective::SwitchPath>(std::move(channel), fallback, std::move(choices), table));
  status_.joined_switch();
}

void Group::set_table(std::vector<collective::Choice> table, std::uint16_t hash) {
  const auto inbox = inbox_.lock();
  options_.table = std::move(table);
  options_.table_hash = hash;
  inbox->events.clear();
}

void Group::set_shares(collective::Shares shares) {
  const auto inbox = inbox_.lock();
  if (shares.paths().size() != switch_paths_.size() + 1) {
    throw std::invalid_argument("shares have " + std::to_string(shares.paths().size()) + " paths, expected " +
                                std::to_string(switch_paths_.size() + 1) +
                                ": one for each switch that this group has joined, and one for the host algorithm");
  }
  inbox->shares = shares;
  shares_ = std::make_unique<collective::Shares>(std::move(shares));
}

void Group::share(std::unique_ptr<transport::ShmNode> node) {
  const auto inbox = inbox_.lock();
  node_ = std::move(node);
  transfers_.lane().share(*node_);
}

collective::Choice Group::choose(collective::Kind kind, kernels::DType dtype, kernels::ReduceOp reduce,
                                 std::uint64_t bytes) const {
  using kernels::DType;
  const auto choose_from = [&](const std::vector<collective::Choice>& table) {
    collective::Choice chosen = collective::choose(table, kind, bytes);
    // Another wire format is for f32 tensors; other tensors travel as they are. Integers with a shared scale can only
    // be summed.
    const bool as_integers = chosen.wire == static_cast<int>(DType::i32) || chosen.wire == static_cast<int>(DType::i8);
    if (dtype != DType::f32 || chosen.wire < 0 || (as_integers && reduce != kernels::ReduceOp::sum)) {
      chosen.wire = static_cast<int>(dtype);
    }
    return chosen;
  };
  const collective::Choice chosen = choose_from(options_.table);
  const auto is_by_switch = [](AlgorithmId algorithm) {
    return algorithm == AlgorithmId::in_network || algorithm == AlgorithmId::split;
  };
  if (beyond_profile_.empty() || !(is_by_switch(chosen.algorithm) || is_by_switch(chosen.between)) ||
      collective::in_hardware_profile(kind, static_cast<DType>(chosen.wire), reduce)) {
    return chosen;
  }
  return choose_from(beyond_profile_);
}

std::shared_ptr<Operation> Group::submit(collective::Call call, std::int64_t timeout_ns, bool on_this_thread,
                                         const char* site, BufferOwnerPtr owner) {
  const EngineCallScope counted;
  collective::validate(call, rank(), size());
  auto operation = std::make_shared<Operation>();
  const std::uint64_t bytes = call.tensor().bytes;
  const std::uint64_t all_bytes = call.choice_bytes();
  const collective::Choice choice = choose(call.kind, call.dtype, call.reduce, all_bytes);
  const bool is_transfer = collective::is_transfer(call.kind);
  call.algorithm = is_transfer ? AlgorithmId::point_to_point : choice.algorithm;
  call.between = choice.between;
  if (size() == 1) call.algorithm = AlgorithmId::local;
  call.wire = static_cast<kernels::DType>(choice.wire);
  if (call.algorithm == AlgorithmId::in_network && switch_paths_.empty()) {
    throw std::invalid_argument("the choice table says in_network, but this group has not joined a switch");
  }
  if (call.algorithm == AlgorithmId::split && shares_ == nullptr) {
    throw std::invalid_argument("the choice table says split, but this group has no shares; call set_shares first");
  }
  if (call.algorithm == AlgorithmId::shared_memory && (node_ == nullptr || node_->size() != size())) {
    throw std::invalid_argument("the choice table says shared_memory, but not all ranks of this group share memory");
  }
  if (!is_transfer) {
    collective::validate_choice(call);
    call.copies_inputs = call.kind != collective::Kind::all_reduce && collective::needs_copied_inputs(call, rank());
  }
  call.table = options_.table_hash;
  operation->owner_ = std::move(owner);
  operation->call_ = std::move(call);
  operation->id_ = engine_.next_operation_id();
  operation->timeout_ns_ = timeout_ns;
  EventRecord& record = operation->record_;
  record.group = options_.id;
  record.bytes = bytes;
  record.operation = static_cast<std::uint8_t>(operation->call_.kind);
  record.dtype = static_cast<std::uint8_t>(operation->call_.dtype);
  record.reduce = static_cast<std::uint8_t>(operation->call_.reduce);
  record.algorithm = static_cast<std::uint8_t>(operation->call_.algorithm);
  record.wire = static_cast<std::uint8_t>(operation->call_.wire);
  record.queued_ns = now_ns();
  operation->deadline_ns_ = timeout_ns < 0 ? -1 : record.queued_ns + timeout_ns;
  operation->site_ = site;

  bool drives = false;
  bool wakes_engine = false;
  {
    const auto inbox = inbox_.lock();
    // First the one step that can fail for lack of memory: a sequence number, once taken, must be used.
    if (!inbox->failure) inbox->submitted.push_back(operation);
    operation->call_.sequence = record.sequence = is_transfer ? inbox->next_transfer++ : inbox->next_sequence++;
    if (inbox->failure) {
      operation->failure_ = inbox->failure;
      operation->failure_.text =
          operation->describe(rank()) + " failed: this group failed before: " + inbox->failure.text;
      record.started_ns = record.finished_ns = now_ns();
      operation->owner_.reset();
      operation->done_.store(true, std::memory_order_release);
      return operation;
    }
    if (!is_transfer) {
      inbox->recent_calls[record.sequence % Inbox::kRecentCalls] = collective::MessageHeader::of(operation->call_, 0);
    }
    status_.begin_operation(record.queued_ns);
    if (inbox->can_take_over()) {
      const bool alone = inbox->submitted.size() == 1;
      // Poll a transfer or a small call at once in any case: its data are then on the way, or it is even done.
      const bool tried = (is_transfer || all_bytes <= kTryBytes) && queue_.empty() && active_.empty();
      if (alone && (on_this_thread || tried)) {
        take_over(inbox.state, record.queued_ns);
        drives = true;
      } else {
        wakes_engine = inbox->driver == Driver::none;
      }
    }
    if (!drives && !wakes_engine) signal(wake_);
  }
  if (wakes_engine) engine_.wake();
  if (drives && on_this_thread) {
    wait_until(*operation, -1, true);
  } else if (drives) {
    drive_until(*operation, 0, false);
  }
  return operation;
}

bool Group::withdraw(const Operation& receive) {
  bool withdrawn = false;
  run_driver_task([&] {
    const auto operation = transfers_.withdraw(receive.id());
    withdrawn = operation != nullptr;
    if (withdrawn) complete(*operation, {Failure::Kind::aborted, rank(), "the receive was withdrawn"});
  });
  return withdrawn;
}

bool Group::wait(const Operation& operation, std::int64_t timeout_ns) {
  if (operation.done()) return true;
  const EngineCallScope counted;
  return wait_until(operation, timeout_ns < 0 ? -1 : now_ns() + timeout_ns, false);
}

bool Group::wait_until(const Operation& operation, std::int64_t until_ns, bool drives) {
  bool checks_signals = interrupts.run_on_this_thread != nullptr && interrupts.run_on_this_thread();
  std::int64_t now = now_ns();
  std::int64_t signal_check_ns = now + kSignalCheckNs;
  for (;;) {
    const bool checks_signals_first = checks_signals && (until_ns < 0 || signal_check_ns < until_ns);
    const std::int64_t stop_ns = checks_signals_first ? signal_check_ns : until_ns;
    if (!drives) {
      const auto inbox = inbox_.lock();
      if (inbox->can_take_over() && has_work(inbox.state)) {
        take_over(inbox.state, now);
        drives = true;
      } else {
        status_.enter(now);
        ++inbox->waiting;
      }
    }
    bool signalled = false;
    if (drives) {
      signalled = drive_until(operation, stop_ns, checks_signals_first);
      drives = false;
    } else {
      operation.wait(stop_ns < 0 ? -1 : std::max<std::int64_t>(0, stop_ns - now));
      const auto inbox = inbox_.lock();
      --inbox->waiting;
      status_.leave(now_ns());
    }
    if (operation.done()) return true;
    now = now_ns();
    if (until_ns >= 0 && now >= until_ns) return false;
    if (!checks_signals || (now < signal_check_ns && !signalled)) continue;
    if (interrupts.interrupts_wait() && !operation.done()) {
      fail({Failure::Kind::aborted, rank(), operation.describe(rank()) + " was interrupted by a signal"});
      // The caller gets its tensors back on return: wait until no thread touches them, whatever signals come.
      checks_signals = false;
      until_ns = -1;
    }
    now = now_ns();
    signal_check_ns = now + kSignalCheckNs;
  }
}

void Group::take_over(Inbox::State& inbox, std::int64_t now) {
  if (inbox.driver == Driver::engine) {
    inbox.engine_sleeps = false;
    cancel_sleep();
  }
  inbox.driver = Driver::caller;
  status_.enter(now);
}

bool Group::drive_until(const Operation& operation, std::int64_t until_ns, bool comes_back) {
  const DefaultFloats floats;
  collective::WaitSet set;
  std::int64_t idle_since = 0;
  bool signalled = false;
  while (!operation.done() && !(signalled && comes_back)) {
    const std::int64_t now = now_ns();
    const bool moved = progress(now);
    if (operation.done() || (until_ns >= 0 && now >= until_ns)) break;
    if (moved) {
      idle_since = 0;
      continue;
    }
    if (idle_since == 0) idle_since = now;
    if (now - idle_since < spin_ns()) {
      pause(options_.yields);
      continue;
    }
    try {
      set.clear();
      set.add(wake_.get(), POLLIN);
      set.wake_at(until_ns);
      wait_for(set);
      if (!set.look_again || !progress(now_ns())) signalled = !sleep_until_ready(set);
    } catch (const std::bad_alloc&) {
      // The wait set did not fit into memory: poll again at once.
    }
    cancel_sleep();
    clear(wake_);
  }
  bool more = false;
  bool can_wait = false;
  {
    auto inbox = inbox_.lock();
    more = has_work(inbox.state);
    can_wait = inbox->waiting == 0 && (comes_back || may_delay_work(inbox.state));
    status_.leave(now_ns());
    inbox_.release_driver(inbox);
  }
  if (more && can_wait) {
    engine_.wake_after_delay();
  } else if (more) {
    engine_.wake();
  }
  return signalled;
}

bool Group::has_work(const Inbox::State& inbox) const {
  return !inbox.empty() || inbox.needs_flush || !queue_.empty() || !active_.empty() || !transfers_.empty() ||
         (inbox.failure && !inbox.closed);
}

bool Group::may_delay_work(const Inbox::State& inbox) const {
  // The first poll of a small call through shared memory wrote all that the other ranks need of this rank.
  const auto is_announced = [](const auto& operation) {
    return operation->call_.algorithm == AlgorithmId::shared_memory && operation->call_.choice_bytes() <= kTryBytes;
  };
  // The next call will also progress sent bytes that still need progress.
  return inbox.empty() && (!inbox.needs_flush || needs_progress_) && queue_.empty() && !inbox.failure &&
         std::all_of(active_.begin(), active_.end(), is_announced);
}

bool Group::try_drive_by_engine() {
  const auto inbox = inbox_.lock();
  if (inbox->driver == Driver::caller || !has_work(inbox.state)) return false;
  inbox->driver = Driver::engine;
  // Before the poll, and not again before the sleep: a request after the poll must end the sleep.
  clear(wake_);
  return true;
}

void Group::release_if_idle() {
  auto inbox = inbox_.lock();
  if (has_work(inbox.state)) return;
  cancel_sleep();  // the next driver prepares its own sleep
  inbox_.release_driver(inbox);
}

void Group::set_engine_sleeps(bool sleeps) {
  const auto inbox = inbox_.lock();
  if (inbox->driver != Driver::engine) return;  // a caller took over
  inbox->engine_sleeps = sleeps;
  if (!sleeps) cancel_sleep();
}

void Group::add_to_engine_sleep(collective::WaitSet& set) {
  const auto inbox = inbox_.lock();
  if (inbox->driver != Driver::engine) return;
  set.add(wake_.get(), POLLIN);
  wait_for(set);
}

void Group::cancel_sleep() {
  if (node_ != nullptr) node_->cancel_sleep();
}

void Group::fail(Failure failure) {
  {
    const auto inbox = inbox_.lock();
    if (inbox->failure) return;
    inbox->failure = std::move(failure);
    if (inbox->driver != Driver::none) {
      signal(wake_);
      return;
    }
  }
  engine_.wake();
}

void Group::drain() {
  const std::int64_t until_ns = now_ns() + kLeaveNs;
  for (bool owes = true; owes && now_ns() < until_ns;) {
    {
      const auto inbox = inbox_.lock();
      if (inbox->failure || inbox->waiting > 0 || inbox->driver == Driver::caller) return;
      owes = !inbox->submitted.empty();
    }
    // Others need nothing of a receive.
    run_driver_task([&] { owes |= !queue_.empty() || !active_.empty() || transfers_.has_sends() || has_unsent(); });
    if (owes) std::this_thread::sleep_for(std::chrono::nanoseconds(kLingerStepNs));
  }
}

void Group::end() {
  const std::string text = "rank " + std::to_string(rank()) + " closed the group";
  fail({.kind = Failure::Kind::aborted, .rank = rank(), .text = text, .remote_reason = {}, .orderly = true});
  // The failure ends the driver's work; the engine thread does the work of a group without a driver.
  auto inbox = inbox_.lock();
  inbox_.wait_until(inbox, [&] { return inbox->driver == Driver::none && !has_work(inbox.state); });
  // Free the ports to the switches now: references to the group may exist for longer.
  switch_paths_.clear();
}

std::vector<EventRecord> Group::events(std::uint64_t since, std::uint64_t* total) const {
  const auto inbox = inbox_.lock();
  *total = inbox->events.total();
  return inbox->events.after(since);
}

std::optional<std::string> Group::recent_call(std::uint32_t sequence) const {
  const auto inbox = inbox_.lock();
  const auto& header = inbox->recent_calls[sequence % Inbox::kRecentCalls];
  if (sequence == 0 || header.sequence != sequence) return std::nullopt;
  return header.summary();
}

}  // namespace netfold::engine
