#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <netfold/collective/message.hpp>
#include <netfold/collective/registry.hpp>
#include <netfold/collective/split.hpp>
#include <netfold/engine/compute_sampler.hpp>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <cstdio>
#include <stdexcept>

namespace netfold::engine {

using collective::Expired;
using collective::Failure;
using collective::Progress;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

namespace {

transport::Fd make_event() {
  transport::Fd fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd) transport::throw_errno("eventfd");
  return fd;
}

void signal(const transport::Fd& fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd.get(), &one, sizeof one);
}

bool clear(const transport::Fd& fd) {
  std::uint64_t value = 0;
  return ::read(fd.get(), &value, sizeof value) > 0;
}

// Sums must not depend on whose thread adds: a caller may flush subnormals to zero (torch.set_flush_denormal).
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

// Between two looks. On a host with other work the rank that is waited for may stand in line behind us: yield at times.
void pause(bool yields) {
  constexpr unsigned kLooksAYield = 16;
  thread_local unsigned looks = 0;
  if (yields || ++looks % kLooksAYield == 0) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// False: a signal ended the sleep.
bool sleep_in(collective::WaitSet& set) {
  timespec timeout{};
  timespec* wait = nullptr;
  if (set.wake_ns >= 0) {
    const std::int64_t left = std::max<std::int64_t>(0, set.wake_ns - now_ns());
    timeout = {.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
    wait = &timeout;
  }
  return ppoll(set.fds.data(), set.fds.size(), wait, nullptr) >= 0 || errno != EINTR;
}

Interrupts interrupts;  // written once, before any thread waits

}  // namespace

bool Operation::wait(std::int64_t timeout_ns) const {
  if (done()) return true;
  const EngineCallScope counted;
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done(); };
  if (timeout_ns < 0) {
    condition_.wait(lock, is_done);
    return true;
  }
  return condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_done);
}

bool Operation::notify() {
  {
    std::lock_guard lock(mutex_);
    if (done()) return false;
    notify_ = true;
  }
  // Who wants to be told is not about to wait, which what was left over may be left for.
  Engine::instance().wake();
  return true;
}

Group::Group(Engine& engine, Options options, std::unique_ptr<transport::Mesh> mesh,
             std::unique_ptr<transport::Mesh> lane, std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes)
    : engine_(engine),
      options_(std::move(options)),
      mesh_(std::move(mesh)),
      lane_(std::make_unique<collective::PointToPoint>(std::move(lane))),
      fallback_meshes_(std::move(fallback_meshes)),
      needs_progress_(mesh_->needs_progress()),
      status_(StatusSegment::instance().open()),
      wake_(make_event()) {
  events_.reserve(kEventCapacity);
  if (StatusWrite status(status_); status) {
    status->group = options_.id;
    status->rank = rank();
    status->size = size();
    status->joined_ns = now_ns();
    StatusWrite::put(status->job, sizeof status->job, options_.job.c_str());
  }
}

Group::~Group() { StatusSegment::instance().close(status_); }

// What is under way, whenever that changes or somebody is waited for; what is done.
void Group::publish_status() {
  StatusWrite status(status_);
  if (!status) return;
  const auto is_down = [](const auto& path) { return !path->is_up(); };
  status->without_switch = std::any_of(switch_paths_.begin(), switch_paths_.end(), is_down) ? 1 : 0;
  status->transfers = static_cast<std::uint32_t>(transfers_.size());
  if (!transfers_.empty()) {
    const Operation& transfer = *transfers_.begin()->second;
    status->transfer_peer = transfer.call_.root == collective::kAnySource ? -1 : transfer.call_.root;
    status->transfer_tag = transfer.call_.tag;
    status->transfer_kind = static_cast<std::uint8_t>(transfer.call_.kind);
    status->transfer_bytes = transfer.record_.bytes;
    status->transfer_ns = transfer.record_.queued_ns;
    StatusWrite::put(status->transfer_site, sizeof status->transfer_site, transfer.site_);
  }
  status->waiting = static_cast<std::uint32_t>(active_.size() + queue_.size());
  status->sequence = 0;
  status->awaited_count = 0;
  const Operation* oldest = !active_.empty() ? active_.front().get() : !queue_.empty() ? queue_.front().get() : nullptr;
  if (oldest == nullptr) return;
  const collective::Call& call = oldest->call_;
  status->sequence = call.sequence;
  status->kind = static_cast<std::uint8_t>(call.kind);
  status->dtype = static_cast<std::uint8_t>(call.dtype);
  status->reduce = static_cast<std::uint8_t>(call.reduce);
  status->algorithm = static_cast<std::uint8_t>(call.algorithm);
  status->bytes = oldest->record_.bytes;
  status->queued_ns = oldest->record_.queued_ns;
  status->deadline_ns = oldest->deadline_ns_;
  StatusWrite::put(status->site, sizeof status->site, oldest->site_);
  if (oldest->algorithm_ == nullptr) return;
  for (const int rank : oldest->algorithm_->awaited()) {
    if (status->awaited_count < StatusEntry::kMaxAwaited) status->awaited[status->awaited_count] = rank;
    ++status->awaited_count;
  }
}

void Group::enter(std::int64_t now) {
  if (inside_++ == 0 && status_ != nullptr) status_->inside.start(now);
}

void Group::leave(std::int64_t now) {
  if (--inside_ == 0 && status_ != nullptr) status_->inside.stop(now);
}

void Group::attach(std::unique_ptr<collective::Channel> channel, std::vector<collective::SwitchPath::Row> rows,
                   std::uint16_t table) {
  std::lock_guard lock(mutex_);
  traffic_.push_back({.generation = channel->generation()});
  auto& fallback = *fallback_meshes_.at(switch_paths_.size());
  switch_paths_.push_back(
      std::make_unique<collective::SwitchPath>(std::move(channel), fallback, std::move(rows), table));
  if (StatusWrite status(status_); status) status->with_switch = 1;
}

void Group::set_table(std::vector<Choice> table, std::uint16_t hash) {
  std::lock_guard lock(mutex_);
  options_.table = std::move(table);
  options_.table_hash = hash;
  events_.clear();
  event_count_ = 0;
}

void Group::set_shares(collective::Shares shares) {
  std::lock_guard lock(mutex_);
  if (shares.paths().size() != switch_paths_.size() + 1) {
    throw std::invalid_argument("a rate for each switch that this group has joined");
  }
  told_shares_ = shares;
  shares_ = std::make_unique<collective::Shares>(std::move(shares));
}

std::optional<collective::Shares> Group::shares() const {
  std::lock_guard lock(mutex_);
  return told_shares_;
}

void Group::share(std::unique_ptr<transport::ShmNode> node) {
  std::lock_guard lock(mutex_);
  node_ = std::move(node);
  lane_->share(*node_);
}

Choice Group::choose(collective::Kind kind, kernels::DType dtype, kernels::ReduceOp reduce, std::uint64_t bytes) const {
  Choice chosen{.kind = kind};
  for (const Choice& row : options_.table) {
    if (row.kind == kind && row.min_bytes <= bytes) chosen = row;
  }
  // Another wire format is for f32 tensors; others always travel as they are. Integers that share a scale can be
  // added, and nothing else.
  const bool as_integers =
      chosen.wire == static_cast<int>(kernels::DType::i32) || chosen.wire == static_cast<int>(kernels::DType::i8);
  if (dtype != kernels::DType::f32 || chosen.wire < 0 || (as_integers && reduce != kernels::ReduceOp::sum)) {
    chosen.wire = static_cast<int>(dtype);
  }
  return chosen;
}

std::shared_ptr<Operation> Group::submit(collective::Call call, std::int64_t timeout_ns, bool on_this_thread,
                                         const char* site) {
  const EngineCallScope counted;
  collective::validate(call, rank(), size());
  auto operation = std::make_shared<Operation>();
  const std::uint64_t bytes = call.tensor().bytes;
  const std::uint64_t all_bytes = call.choice_bytes();
  const Choice choice = choose(call.kind, call.dtype, call.reduce, all_bytes);
  const bool is_transfer = collective::is_transfer(call.kind);
  call.algorithm = is_transfer ? collective::AlgorithmId::point_to_point : choice.algorithm;
  call.between = choice.between;
  if (size() == 1) call.algorithm = collective::AlgorithmId::local;
  call.wire = static_cast<kernels::DType>(choice.wire);
  if (call.algorithm == collective::AlgorithmId::in_network && switch_paths_.empty()) {
    throw std::invalid_argument("the choice table says in_network, but this group has not joined a switch");
  }
  if (call.algorithm == collective::AlgorithmId::split && shares_ == nullptr) {
    throw std::invalid_argument("the choice table says split, but nothing is known of this group's switch");
  }
  if (call.algorithm == collective::AlgorithmId::shared_memory && (node_ == nullptr || node_->size() != size())) {
    throw std::invalid_argument("the choice table says shared_memory, but not all ranks of this group share it");
  }
  if (!is_transfer) collective::validate_choice(call);
  call.table = options_.table_hash;
  operation->call_ = std::move(call);
  operation->id_ = engine_.next_operation_id_.fetch_add(1);
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
  operation->overdue_ns_ = record.queued_ns + kOverdueNs;
  operation->site_ = site;

  bool drive = false;
  bool wake_engine = false;
  {
    std::lock_guard lock(mutex_);
    // The one step that can fail for want of memory comes first: a number that is taken is used.
    if (!failure_) inbox_.push_back(operation);
    operation->call_.sequence = record.sequence = is_transfer ? next_transfer_++ : next_sequence_++;
    if (failure_) {
      operation->failure_ = failure_;
      operation->failure_.text = describe(*operation) + " failed: this group failed before: " + failure_.text;
      operation->record_.started_ns = operation->record_.finished_ns = now_ns();
      operation->done_.store(true, std::memory_order_release);
      return operation;
    }
    if (!is_transfer)
      recent_calls_[record.sequence % kRecentCalls] = collective::MessageHeader::of(operation->call_, 0);
    if (outstanding_++ == 0 && status_ != nullptr) status_->under_way.start(record.queued_ns);
    if (can_take_over()) {
      const bool alone = inbox_.size() == 1;
      // A message, and what is small, is tried at once in any case: it is then on its way, or even done.
      const bool tried = (is_transfer || all_bytes <= kTryBytes) && queue_.empty() && active_.empty();
      if (alone && (on_this_thread || tried)) {
        take_over(record.queued_ns);
        drive = true;
      } else if (driver_ == Driver::none) {
        wake_engine = true;
      } else {
        signal(wake_);
      }
    } else {
      signal(wake_);
    }
  }
  if (wake_engine) engine_.wake();
  if (drive && on_this_thread) {
    wait_until(*operation, -1, true);
  } else if (drive) {
    drive_until(*operation, 0, false);
  }
  return operation;
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
      std::lock_guard lock(mutex_);
      if (can_take_over() && has_work()) {
        take_over(now);
        drives = true;
      } else {
        enter(now);
        ++waiting_;
      }
    }
    bool signalled = false;
    if (drives) {
      signalled = drive_until(operation, stop_ns, checks_signals_first);
      drives = false;
    } else {
      operation.wait(stop_ns < 0 ? -1 : std::max<std::int64_t>(0, stop_ns - now));
      std::lock_guard lock(mutex_);
      --waiting_;
      leave(now_ns());
    }
    if (operation.done()) return true;
    now = now_ns();
    if (until_ns >= 0 && now >= until_ns) return false;
    if (!checks_signals || (now < signal_check_ns && !signalled)) continue;
    if (interrupts.interrupts_wait() && !operation.done()) {
      fail({Failure::Kind::aborted, rank(), describe(operation) + " was interrupted by a signal"});
      // The caller has its tensors back when this returns: wait until nobody touches them, whatever else comes.
      checks_signals = false;
      until_ns = -1;
    }
    now = now_ns();
    signal_check_ns = now + kSignalCheckNs;
  }
}

bool Group::can_take_over() const { return driver_ == Driver::none || (driver_ == Driver::engine && engine_sleeps_); }

void Group::take_over(std::int64_t now) {
  if (driver_ == Driver::engine) {
    engine_sleeps_ = false;
    cancel_sleep();
  }
  driver_ = Driver::caller;
  enter(now);
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
      if (!set.look_again || !progress(now_ns())) signalled = !sleep_in(set);
    } catch (const std::bad_alloc&) {
      // No memory for the list of what to wait for: look again at once.
    }
    cancel_sleep();
    clear(wake_);
  }
  bool more = false;
  bool can_wait = false;
  {
    std::lock_guard lock(mutex_);
    driver_ = Driver::none;
    more = has_work();
    can_wait = waiting_ == 0 && (comes_back || may_leave_work());
    leave(now_ns());
    driver_left_.notify_all();
  }
  if (more && can_wait) {
    engine_.wake_after_delay();
  } else if (more) {
    engine_.wake();
  }
  return signalled;
}

void Group::wake_driver() { signal(wake_); }

bool Group::driven_by_engine() const {
  std::lock_guard lock(mutex_);
  return driver_ == Driver::engine;
}

bool Group::has_work() const {
  return !inbox_.empty() || !driver_tasks_.empty() || behind_ || !queue_.empty() || !active_.empty() ||
         !transfers_.empty() || (failure_ && !closed_);
}

bool Group::may_leave_work() const {
  // What others need of a small call through memory was said at the first look.
  const auto is_said = [](const auto& operation) {
    return operation->call_.algorithm == collective::AlgorithmId::shared_memory &&
           operation->call_.choice_bytes() <= kTryBytes;
  };
  // What was sent and needs us further is seen off by the next call as well.
  return inbox_.empty() && driver_tasks_.empty() && (!behind_ || needs_progress_) && queue_.empty() && !failure_ &&
         std::all_of(active_.begin(), active_.end(), is_said);
}

bool Group::mesh_is_taken() const {
  return std::any_of(active_.begin(), active_.end(), [](const auto& other) { return is_on_mesh(*other); });
}

bool Group::is_split(const Operation& operation) { return operation.call_.algorithm == collective::AlgorithmId::split; }

// One as integers is two in a row, each with an end of its own.
bool Group::updates_shares(const Operation& operation) const {
  return is_split(operation) &&
         (operation.call_.is_quantised() || collective::Split::updates_shares(operation.call_, *shares_));
}

bool Group::is_on_mesh(const Operation& operation) {
  if (operation.call_.algorithm == collective::AlgorithmId::in_network) return false;
  return operation.algorithm_ == nullptr || operation.algorithm_->on_mesh();
}

bool Group::can_start(const Operation& operation) const {
  const auto on_channel = [](const Operation& other) {
    return is_split(other) || other.call_.algorithm == collective::AlgorithmId::in_network;
  };
  // A split one begins with the switch's part, and takes the mesh when those before it are through with it. But where
  // the next one is cut by what it did, it has the mesh to itself.
  if ((!on_channel(operation) || updates_shares(operation)) && mesh_is_taken()) return false;
  const auto is_updating = [](const auto& other) { return other->updates_shares_; };
  if (is_split(operation) && std::any_of(active_.begin(), active_.end(), is_updating)) return false;
  if (!on_channel(operation)) return true;
  // One as integers is two on the channel, the second when the first is done: which is not at the same moment on
  // every rank, while all must start the same in the same order. So it has the channel to itself.
  const auto in_the_way = [&](const auto& other) {
    return on_channel(*other) && (other->call_.is_quantised() || operation.call_.is_quantised());
  };
  const auto has_room = [](const auto& path) { return path->can_start(); };
  return std::all_of(switch_paths_.begin(), switch_paths_.end(), has_room) &&
         std::none_of(active_.begin(), active_.end(), in_the_way);
}

bool Group::progress(std::int64_t now) {
  try {
    return progress_once(now);
  } catch (const std::exception& error) {
    // No memory, no descriptor, or a fault of ours: the group cannot go on, the process and its other groups can.
    fail({Failure::Kind::system, rank(),
          "rank " + std::to_string(rank()) + ": netfold could not go on with this group: " + error.what()});
    return true;  // and the next turn ends what is under way
  }
}

bool Group::progress_once(std::int64_t now) {
  bool failed = false;
  std::vector<std::function<void()>> actions;  // a vector: an empty deque allocates, on every turn
  bool behind = false;
  {
    std::lock_guard lock(mutex_);
    while (!inbox_.empty()) {
      auto& to = collective::is_transfer(inbox_.front()->call_.kind) ? arrived_ : queue_;
      to.push_back(std::move(inbox_.front()));
      inbox_.pop_front();
    }
    failed = static_cast<bool>(failure_);
    actions.swap(driver_tasks_);
    behind = behind_;
  }
  for (const auto& action : actions) action();
  if (behind) flush();
  begin_transfers(now);
  if (failed) {
    fail_all();
    return false;
  }
  bool moved = false;
  while (!queue_.empty() && can_start(*queue_.front())) {
    start_next(now);
    moved = true;
  }
  Failure failure;
  const auto next_on_mesh =
      std::find_if(active_.begin(), active_.end(), [](const auto& other) { return is_on_mesh(*other); });
  if (next_on_mesh != active_.end() && (*next_on_mesh)->algorithm_ != nullptr) (*next_on_mesh)->algorithm_->take_mesh();
  for (std::size_t i = 0; i < active_.size() && !failure;) {
    Operation& operation = *active_[i];
    Progress progress = operation.algorithm_ == nullptr ? Progress::done : operation.algorithm_->poll(now);
    moved |= progress != Progress::idle;
    if (progress == Progress::failed) {
      failure = operation.algorithm_->failure();
      // Where this rank went on, what matters is how it made the call that the other is still in.
      if (failure.their_call < operation.call_.sequence) {
        if (const auto mine = recent_call(failure.their_call)) failure.text += "; this rank has been in " + *mine;
      }
      failure.text = describe(operation) + " failed: " + failure.text;
    } else if (progress != Progress::done && operation.deadline_ns_ >= 0 && now >= operation.deadline_ns_) {
      if (!operation.in_grace_period_ && operation.algorithm_->awaited_may_wait()) {
        operation.in_grace_period_ = true;
        operation.deadline_ns_ = now + kGracePeriodNs;
        ++i;
        continue;
      }
      failure = timed_out(operation);
    } else if (progress != Progress::done) {
      check_overdue(operation, now);
    } else {
      const auto keep = active_[i];
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      complete(*keep, {});
      continue;
    }
    ++i;
  }
  if (!failure) moved |= progress_transfers(now, failure);
  if (!failure) {
    for (const auto& operation : queue_) {
      if (operation->deadline_ns_ >= 0 && now >= operation->deadline_ns_) {
        failure.kind = Failure::Kind::timeout;
        failure.text = describe(*operation) + " did not start" + within(operation->timeout_ns_) +
                       ": the operations before it are not done";
        failure.expired = {operation->call_.sequence, operation->timeout_ns_};
        break;
      }
    }
  }
  if (failure) {
    read_failure_in_memory(failure);
    {
      std::lock_guard lock(mutex_);
      if (!failure_) {
        failure_ = failure;
        failure_names_operation_ = true;
      }
    }
    fail_all();
  }
  // What an operation left behind must be seen off, though nobody waits for it.
  if (needs_progress_ && active_.empty() && transfers_.empty()) flush();
  publish_traffic();
  return moved;
}

Failure Group::timed_out(const Operation& operation) const {
  Failure failure;
  failure.kind = Failure::Kind::timeout;
  failure.expired = {operation.call_.sequence, operation.timeout_ns_};
  failure.text = describe(operation) + " did not finish" + within(operation.timeout_ns_);
  const auto ranks = operation.algorithm_->awaited();
  if (ranks.empty()) return failure;
  failure.rank = ranks.front();
  failure.text += "; still waiting for rank";
  for (const int rank : ranks) failure.text += " " + std::to_string(rank);
  return failure;
}

void Group::share_timeout(Failure& failure) {
  if (failure.kind != Failure::Kind::peer_lost || failure.expired.call == 0) return;
  for (const auto& operation : active_) {
    const Expired mine{operation->call_.sequence, operation->timeout_ns_};
    if (mine != failure.expired || operation->algorithm_ == nullptr) continue;
    Failure same = timed_out(*operation);
    if (same.rank < 0) same.rank = failure.rank;
    same.remote_reason = failure.remote_reason.empty() ? failure.text : failure.remote_reason;
    failure = std::move(same);
    std::lock_guard lock(mutex_);
    failure_ = failure;
    failure_names_operation_ = true;
    return;
  }
}

void Group::publish_traffic() {
  if (switch_paths_.empty()) return;
  std::lock_guard lock(mutex_);
  for (std::size_t shard = 0; shard < switch_paths_.size(); ++shard) {
    const collective::Channel& channel = switch_paths_[shard]->channel();
    const protocol::Worker& machine = channel.machine();
    Traffic& traffic = traffic_[shard];
    traffic.generation = switch_paths_[shard]->is_up() ? channel.generation() : 0;
    traffic.packets_sent = machine.packets_sent();
    traffic.retransmissions = machine.retransmissions();
    traffic.smoothed_rtt_ns = machine.smoothed_rtt_ns();
    traffic.oldest_outstanding = machine.oldest_outstanding();
    traffic.idle = machine.idle();
    if (traffic.path_error != channel.path_error()) traffic.path_error = channel.path_error();
    if (traffic.send_error != channel.send_error()) traffic.send_error = channel.send_error();
    for (int i = 0; i < protocol::kDropCount; ++i) {
      traffic.drops[i] = channel.drops(static_cast<protocol::Drop>(i));
    }
  }
}

void Group::start_next(std::int64_t now) {
  const bool waits_for_mesh = mesh_is_taken();
  queue_.front()->updates_shares_ = updates_shares(*queue_.front());
  // Among the active operations first: if its algorithm cannot be made, it ends with the group.
  active_.push_back(queue_.front());
  queue_.pop_front();
  Operation& operation = *active_.back();
  operation.record_.started_ns = now;
  operation.algorithm_ =
      collective::make_algorithm(operation.call_, {*mesh_, switch_paths_, node_.get(), options_.nodes, shares_.get()});
  if (waits_for_mesh && operation.algorithm_ != nullptr) operation.algorithm_->wait_for_mesh();
}

void Group::complete(Operation& operation, Failure failure) {
  EventRecord& record = operation.record_;
  record.finished_ns = now_ns();
  if (record.started_ns == 0) record.started_ns = record.finished_ns;
  if (operation.algorithm_ != nullptr) {
    record.wire_bytes = operation.algorithm_->wire_bytes();
    record.retransmissions = operation.algorithm_->retransmissions();
    record.registration_hits = operation.algorithm_->registrations().hits;
    record.registration_misses = operation.algorithm_->registrations().misses;
    record.slowest_rank = operation.algorithm_->slowest_rank();
    const auto substitute = operation.algorithm_->substitute();
    if (substitute != collective::AlgorithmId::local) record.algorithm = static_cast<std::uint8_t>(substitute);
  }
  record.error = static_cast<std::uint8_t>(failure.kind);
  operation.algorithm_.reset();
  if (StatusWrite status(status_); status) {
    status->sequence = 0;
    status->waiting = static_cast<std::uint32_t>(active_.size() + queue_.size());
    status->transfers = static_cast<std::uint32_t>(transfers_.size());
    ++status->operations;
    status->tensor_bytes += record.bytes;
    status->wire_bytes += record.wire_bytes;
    status->retransmissions += record.retransmissions;
    // Messages are counted apart: their numbers say nothing about who is behind.
    if (!collective::is_transfer(operation.call_.kind)) {
      if (record.slowest_rank >= 0) ++status->judged;
      if (record.slowest_rank == rank()) ++status->last;
      status->done_sequence = record.sequence;
      status->done_kind = record.operation;
      status->done_ns = record.finished_ns;
      StatusWrite::put(status->done_site, sizeof status->done_site, operation.site_);
    }
    if (failure && status->failed == 0) {
      status->failed = 1;
      StatusWrite::put(status->failure, sizeof status->failure, failure.text.c_str());
    }
  }
  {
    std::lock_guard lock(mutex_);
    record.inlined = driver_ == Driver::caller ? 1 : 0;
    if (events_.size() < kEventCapacity) {
      events_.push_back(record);
    } else {
      events_[event_count_ % kEventCapacity] = record;
    }
    ++event_count_;
    if (shares_ != nullptr && shares_->operations() != told_shares_->operations()) told_shares_ = *shares_;
    if (--outstanding_ == 0 && status_ != nullptr) status_->under_way.stop(record.finished_ns);
  }
  bool notify = false;
  {
    std::lock_guard lock(operation.mutex_);
    operation.failure_ = std::move(failure);
    operation.done_.store(true, std::memory_order_release);
    notify = operation.notify_;
    operation.condition_.notify_all();
  }
  if (notify) engine_.push_completion(operation.id_);
}

int Group::user_of_memory() const {
  for (int position = 0; position < node_->size(); ++position) {
    // A process that has ended touches nothing any more.
    if (position != node_->self() && node_->is_used_by(position) && !mesh_->hung_up(node_->rank(position))) {
      return node_->rank(position);
    }
  }
  return -1;
}

bool Group::reclaim_memory(std::int64_t now, Failure& failure) {
  constexpr std::int64_t kFirstLookNs = 20'000;
  constexpr std::int64_t kLastLookNs = 5'000'000;
  if (node_ == nullptr) return true;
  if (revoke_until_ns_ < 0) {
    node_->leave(failure.orderly ? transport::ShmNode::kLeft : transport::ShmNode::kFailed, failure.rank,
                 failure.remote_reason.empty() ? failure.text : failure.remote_reason, failure.expired.call,
                 failure.expired.timeout_ns);
    revoke_until_ns_ = now + kRevokeNs;
  }
  look_at_users_ns_ = -1;
  const int user = user_of_memory();
  if (user < 0) return true;
  if (now < revoke_until_ns_) {
    const std::int64_t waited_ns = now - (revoke_until_ns_ - kRevokeNs);
    look_at_users_ns_ = now + std::clamp(waited_ns / 4, kFirstLookNs, kLastLookNs);
    return false;
  }
  failure.text += "; rank " + std::to_string(user) +
                  " has been stopped while it reads or writes this rank's tensors, and may still do so when it goes "
                  "on: do not use them again before it has ended";
  std::lock_guard lock(mutex_);
  failure_.text = failure.text;
  return true;
}

void Group::fail_all() {
  Failure failure = this->failure();
  const std::int64_t now = now_ns();
  if (close_ns_ < 0) {
    share_timeout(failure);
    // Operations keep their tensors until then, and other groups of this thread go on.
    if (!reclaim_memory(now, failure)) return;
    collective::send_abort(*mesh_, failure);
    for (const auto& fallback : fallback_meshes_) collective::send_abort(*fallback, failure);
    if (lane_->unconfirmed() || has_unsent()) linger_until_ns_ = now + kLingerNs;
    lane_->abort(failure);
    // No memory is anybody's but its owner's when that hears of the failure.
    mesh_->cancel();
    lane_->mesh().cancel();
    for (const auto& fallback : fallback_meshes_) fallback->cancel();
    // A broken connection looks the same whether its owner died or only gave up first: leave ours open until the
    // others have seen for themselves who died.
    const bool first_hand = failure.kind == Failure::Kind::peer_lost && failure.remote_reason.empty();
    close_ns_ = first_hand ? now + kPeerLostGraceNs : now;
  }
  const auto end = [&](const std::shared_ptr<Operation>& operation) {
    Failure told = failure;
    if (!failure_names_operation_) told.text = describe(*operation) + " failed: " + failure.text;
    complete(*operation, std::move(told));
  };
  // One leaves its queue when it has ended, so that the next turn goes on where this one was cut short.
  for (; !active_.empty(); active_.erase(active_.begin())) end(active_.front());
  for (; !queue_.empty(); queue_.pop_front()) end(queue_.front());
  for (; !arrived_.empty(); arrived_.pop_front()) end(arrived_.front());
  for (; !transfers_.empty(); transfers_.erase(transfers_.begin())) end(transfers_.begin()->second);
  if (StatusWrite status(status_); status) status->waiting = status->transfers = 0;
  // Peers must hear of it now, not when this process ends.
  if (now < close_ns_) return;
  if (needs_progress_) flush();
  if (now < linger_until_ns_ && (lane_->unconfirmed() || has_unsent())) {
    close_ns_ = now + kLingerStepNs;
    return;
  }
  mesh_->close();
  lane_->close();
  for (const auto& fallback : fallback_meshes_) fallback->close();
  std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Group::has_unsent() const {
  return mesh_->has_unsent() || lane_->mesh().has_unsent() ||
         std::any_of(fallback_meshes_.begin(), fallback_meshes_.end(),
                     [](const auto& fallback) { return fallback->has_unsent(); });
}

void Group::read_failure_in_memory(Failure& failure) const {
  if (node_ == nullptr || failure.kind != Failure::Kind::peer_lost || !failure.remote_reason.empty()) return;
  for (int position = 0; position < node_->size(); ++position) {
    const auto& segment = node_->segment(position);
    if (node_->rank(position) != failure.rank ||
        segment.left.load(std::memory_order_acquire) != transport::ShmNode::kFailed) {
      continue;
    }
    failure.remote_reason.assign(segment.reason, segment.reason_bytes);
    failure.expired = {segment.expired_call, segment.expired_timeout_ns};
    failure.text += "; it gave up on the group: " + failure.remote_reason;
    if (segment.fault_rank >= 0 && segment.fault_rank != rank()) failure.rank = segment.fault_rank;
    return;
  }
}

void Group::fail(Failure failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    if (driver_ != Driver::none) {
      signal(wake_);
      return;
    }
  }
  engine_.wake();
}

Failure Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::int64_t Group::spin_ns() const {
  const auto in_memory = [](const auto& operation) {
    return operation->call_.algorithm == collective::AlgorithmId::shared_memory;
  };
  const bool for_memory = std::any_of(active_.begin(), active_.end(), in_memory) || lane_->waits_for_memory();
  if (!options_.spins_for_sockets && !for_memory) return needs_progress_ ? kDrivenSpinNs : 0;
  return static_cast<std::int64_t>(options_.spin_us) * 1000;
}

void Group::cancel_sleep() {
  if (node_ != nullptr) node_->cancel_sleep();
}

void Group::wait_for(collective::WaitSet& set) {
  publish_status();
  if (look_at_users_ns_ >= 0) {
    set.wake_at(look_at_users_ns_);
    return;  // of a failed group, whose algorithms are not polled any more
  }
  set.wake_at(close_ns_);
  for (const auto& operation : active_) {
    if (operation->algorithm_ != nullptr) operation->algorithm_->wait_for(set);
    set.wake_at(operation->deadline_ns_);
    set.wake_at(operation->overdue_ns_);
  }
  mesh_->wait_to_flush(set.fds);
  lane_->mesh().wait_to_flush(set.fds);
  for (const auto& fallback : fallback_meshes_) fallback->wait_to_flush(set.fds);
  for (const auto& operation : queue_) set.wake_at(operation->deadline_ns_);
  if (node_ != nullptr && (mesh_is_taken() || !transfers_.empty())) {
    node_->prepare_sleep();
    set.add(node_->doorbell(), POLLIN);
    set.look_again = true;
  }
  if (transfers_.empty()) return;
  lane_->wait_for(set);
  set.wake_at(transfer_deadline_ns_);
}

std::vector<Group::Traffic> Group::traffic() const {
  std::lock_guard lock(mutex_);
  return traffic_;
}

std::vector<EventRecord> Group::events(std::uint64_t since, std::uint64_t* total) const {
  std::lock_guard lock(mutex_);
  *total = event_count_;
  std::uint64_t next = std::max(since, event_count_ - events_.size());
  std::vector<EventRecord> out;
  for (; next < event_count_; ++next) out.push_back(events_[next % kEventCapacity]);
  return out;
}

std::string Group::within(std::int64_t timeout_ns) {
  char text[48];
  std::snprintf(text, sizeof text, " within its timeout of %.1f s", static_cast<double>(timeout_ns) / 1e9);
  return text;
}

std::string Group::describe(const Operation& operation) const {
  const collective::Call& call = operation.call_;
  char waited[32];
  std::snprintf(waited, sizeof waited, "%.1f s", static_cast<double>(now_ns() - operation.record_.queued_ns) / 1e9);
  std::string text =
      "rank " + std::to_string(rank()) + ": " + collective::name(call.kind) + " #" + std::to_string(call.sequence);
  if (call.elements() > 0) {
    text += " of " + std::to_string(call.elements()) + " " + kernels::name(call.dtype) + " (" +
            std::to_string(call.tensor().bytes) + " bytes)";
  }
  text += std::string(" by ") + collective::name(call.algorithm);
  if (operation.site_ != nullptr) text += std::string(", called at ") + operation.site_;
  return text + ", after " + waited + ",";
}

Engine& Engine::instance() {
  // Never destroyed: threads of a dying process may still be inside. A child made by fork has an engine of its own,
  // since the thread of its parent's did not come along, and nobody lets go of what that had locked.
  static std::atomic<Engine*> engine = [] {
    pthread_atfork(nullptr, nullptr, [] { engine = new Engine(engine); });
    return new Engine(nullptr);
  }();
  return *engine;
}

// Made when the library is loaded: a child of a fork during the first use would wait for the thread that makes it.
[[maybe_unused]] static const auto& made_at_load = Engine::instance();

void Engine::set_interrupts(Interrupts given) { interrupts = given; }

std::shared_ptr<Group> Engine::add_group(Group::Options options, std::unique_ptr<transport::Mesh> mesh,
                                         std::unique_ptr<transport::Mesh> lane,
                                         std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes) {
  auto group =
      std::make_shared<Group>(*this, std::move(options), std::move(mesh), std::move(lane), std::move(fallback_meshes));
  std::lock_guard thread_lock(thread_mutex_);
  std::lock_guard lock(mutex_);
  groups_.push_back(group);
  if (!thread_.joinable()) {
    stopping_ = false;
    wake_ = make_event();
    timer_ = transport::Fd(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
    if (!timer_) transport::throw_errno("timerfd_create");
    timer_armed_ = false;
    thread_ = std::thread([this] { run(); });
  }
  return group;
}

void Engine::remove_group(const std::shared_ptr<Group>& group) {
  const std::string text = "rank " + std::to_string(group->rank()) + " closed the group";
  group->fail(
      {.kind = Failure::Kind::aborted, .rank = group->rank(), .text = text, .remote_reason = {}, .orderly = true});
  {
    // The failure above makes whoever drives finish; the engine thread tears down a group without a driver.
    std::unique_lock lock(group->mutex_);
    group->driver_left_.wait(lock, [&] { return group->driver_ == Group::Driver::none && !group->has_work(); });
    // Its port on the switch goes now, not when the last who knows the group has forgotten it.
    group->switch_paths_.clear();
  }
  // Held until the thread has ended: a group that is added meanwhile would take back its word to stop.
  std::lock_guard thread_lock(thread_mutex_);
  std::thread ended;
  {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
    if (groups_.empty() && thread_.joinable()) {
      stopping_ = true;
      signal(wake_);
      ended = std::move(thread_);
    }
  }
  if (ended.joinable()) ended.join();
}

void Engine::wake() {
  std::lock_guard lock(mutex_);
  if (wake_) signal(wake_);
}

bool Engine::progress_all(const std::vector<std::shared_ptr<Group>>& driven) {
  const std::int64_t now = now_ns();
  bool moved = false;
  for (const auto& group : driven) {
    // One that had no more work the last time may have a driver of its own by now.
    if (!group->driven_by_engine()) continue;
    moved |= group->progress(now);
    std::lock_guard lock(group->mutex_);
    if (group->has_work()) continue;
    group->cancel_sleep();  // the next driver lies down for itself
    group->driver_ = Group::Driver::none;
    group->driver_left_.notify_all();
  }
  return moved;
}

void Engine::set_sleeping(const std::vector<std::shared_ptr<Group>>& driven, bool sleeps) {
  for (const auto& group : driven) {
    std::lock_guard lock(group->mutex_);
    if (group->driver_ != Group::Driver::engine) continue;  // a caller took over
    group->engine_sleeps_ = sleeps;
    if (!sleeps) group->cancel_sleep();
  }
}

// For what may be done before: at most kMaxTakeoverDelayNs from now, whoever asks again meanwhile.
void Engine::wake_after_delay() {
  if (timer_armed_.exchange(true)) return;
  std::lock_guard lock(mutex_);
  const itimerspec once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = takeover_delay_ns_}};
  if (timer_) timerfd_settime(timer_.get(), 0, &once, nullptr);
}

void Engine::run() {
  Round round;
  for (;;) {
    try {
      if (!run_once(round)) return;
    } catch (const std::bad_alloc&) {
      // No memory for this thread's own lists; nothing is half done, so try again when there may be some.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

bool Engine::run_once(Round& round) {
  auto& [driven, set, idle_since] = round;
  clear(wake_);
  const bool is_late = clear(timer_);
  if (is_late) timer_armed_.exchange(false);  // reads what wake_after_delay wrote: this turn sees what it was for
  driven.clear();
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    for (const auto& group : groups_) {
      std::lock_guard group_lock(group->mutex_);
      if (group->driver_ == Group::Driver::caller || !group->has_work()) continue;
      driven.push_back(group);
      group->driver_ = Group::Driver::engine;
      // Before the turn, and not again before the sleep: a request made after the turn must end the sleep.
      clear(group->wake_);
    }
  }
  // Callers that wait for each of their messages wake this thread for nothing: leave them alone for longer.
  if (is_late)
    takeover_delay_ns_ =
        driven.empty() ? std::min(2 * takeover_delay_ns_.load(), kMaxTakeoverDelayNs) : kTakeoverDelayNs;
  if (progress_all(driven)) {
    idle_since = 0;
    return true;
  }
  const std::int64_t now = now_ns();
  std::int64_t spin_ns = 0;
  bool yields = false;
  for (const auto& group : driven) {
    if (!group->driven_by_engine()) continue;  // what it is at is its driver's to know
    spin_ns = std::max(spin_ns, group->spin_ns());
    yields |= group->options_.yields;
  }
  if (idle_since == 0) idle_since = now;
  if (!driven.empty() && now - idle_since < spin_ns) {
    pause(yields);
    return true;
  }
  set.clear();
  set.add(wake_.get(), POLLIN);
  set.add(timer_.get(), POLLIN);
  for (const auto& group : driven) {
    std::lock_guard lock(group->mutex_);
    if (group->driver_ != Group::Driver::engine) continue;
    set.add(group->wake_.get(), POLLIN);
    group->wait_for(set);
  }
  if (!set.look_again || !progress_all(driven)) {
    set_sleeping(driven, true);
    sleep_in(set);
  }
  set_sleeping(driven, false);
  idle_since = 0;
  return true;
}

void Engine::push_completion(std::uint64_t id) {
  std::lock_guard lock(completion_mutex_);
  completions_.push_back(id);
  completion_condition_.notify_one();
}

std::optional<std::uint64_t> Engine::next_completion(std::int64_t timeout_ns) {
  std::unique_lock lock(completion_mutex_);
  const std::uint64_t interrupts = completion_interrupts_;
  completion_condition_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                 [&] { return !completions_.empty() || completion_interrupts_ != interrupts; });
  if (completions_.empty()) return std::nullopt;
  const std::uint64_t id = completions_.front();
  completions_.pop_front();
  return id;
}

void Engine::interrupt_completions() {
  std::lock_guard lock(completion_mutex_);
  ++completion_interrupts_;
  completion_condition_.notify_all();
}

}  // namespace netfold::engine
