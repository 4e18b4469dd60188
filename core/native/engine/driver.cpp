// A group's driver at each poll: start, poll and complete operations in their order.
#include <netfold/collective/registry.hpp>
#include <netfold/engine/engine.hpp>

#include <algorithm>
#include <exception>
#include <utility>

namespace netfold::engine {

using collective::AlgorithmId;
using collective::Failure;
using collective::Progress;

bool Group::progress(std::int64_t now) {
  try {
    return progress_once(now);
  } catch (const std::exception& error) {
    // Out of memory, out of descriptors, or a fault of netfold: only this group ends.
    fail({Failure::Kind::system, rank(),
          "rank " + std::to_string(rank()) + ": netfold could not go on with this group: " + error.what()});
    return true;  // so that the next poll ends what is under way
  }
}

bool Group::progress_once(std::int64_t now) {
  bool failed = false;
  bool needs_flush = false;
  std::vector<std::function<void()>> tasks;  // a vector: an empty deque allocates, at every poll
  {
    const auto inbox = inbox_.lock();
    while (!inbox->submitted.empty()) {
      auto& operation = inbox->submitted.front();
      if (collective::is_transfer(operation->call_.kind)) {
        transfers_.add(std::move(operation));
      } else {
        queue_deadline_ns_ = earlier(queue_deadline_ns_, operation->deadline_ns_);
        queue_.push_back(std::move(operation));
      }
      inbox->submitted.pop_front();
    }
    failed = static_cast<bool>(inbox->failure);
    tasks.swap(inbox->tasks);
    needs_flush = inbox->needs_flush;
  }
  for (const auto& task : tasks) task();
  if (needs_flush) flush();
  transfers_.post(now);
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
  moved |= poll_active(now, failure);
  if (!failure) moved |= transfers_.poll(now, failure, [this](Operation& done) { complete(done, {}); });
  if (!failure) ask_unconnected(now);
  if (!failure) check_queue_deadline(now, failure);
  if (failure) {
    read_failure_in_memory(failure);
    {
      const auto inbox = inbox_.lock();
      if (!inbox->failure) {
        inbox->failure = failure;
        failure_names_operation_ = true;
      }
    }
    fail_all();
  }
  // Sent bytes must progress although no operation waits for them.
  if (needs_progress_ && active_.empty() && transfers_.empty()) flush();
  publish_traffic();
  return moved;
}

void Group::check_queue_deadline(std::int64_t now, Failure& failure) {
  if (queue_deadline_ns_ < 0 || now < queue_deadline_ns_) return;
  // The bound may be that of an operation that has started meanwhile.
  queue_deadline_ns_ = -1;
  for (const auto& operation : queue_) {
    if (operation->deadline_ns_ >= 0 && now >= operation->deadline_ns_) {
      failure = timed_out(*operation);
      return;
    }
    queue_deadline_ns_ = earlier(queue_deadline_ns_, operation->deadline_ns_);
  }
}

bool Group::poll_active(std::int64_t now, Failure& failure) {
  bool moved = false;
  const auto on_mesh =
      std::find_if(active_.begin(), active_.end(), [](const auto& operation) { return is_on_mesh(*operation); });
  if (on_mesh != active_.end() && (*on_mesh)->algorithm_ != nullptr) (*on_mesh)->algorithm_->take_mesh();
  for (std::size_t i = 0; i < active_.size() && !failure;) {
    Operation& operation = *active_[i];
    const Progress progress = operation.algorithm_ == nullptr ? Progress::done : operation.algorithm_->poll(now);
    moved |= progress != Progress::idle;
    if (progress == Progress::done) {
      const auto keep = active_[i];
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      complete(*keep, {});
      if (i == 0) begin_oldest(now);
      continue;
    }
    ++i;
    if (progress == Progress::failed) {
      failure = operation.algorithm_->failure();
      // If this rank went on after the call that the other rank is still in, tell how this rank made that call.
      if (failure.their_call < operation.call_.sequence) {
        if (const auto call = recent_call(failure.their_call)) failure.text += "; this rank has been in " + *call;
      }
      failure.text = operation.describe(rank()) + " failed: " + failure.text;
    } else if (operation.deadline_ns_ < 0 || now < operation.deadline_ns_) {
      if (i == 1) check_overdue(operation, now);
    } else if (!operation.in_grace_period_ && operation.algorithm_->awaited_may_wait()) {
      operation.in_grace_period_ = true;
      operation.deadline_ns_ = now + kGracePeriodNs;
    } else {
      failure = timed_out(operation);
    }
  }
  return moved;
}

bool Group::is_split(const Operation& operation) { return operation.call_.algorithm == AlgorithmId::split; }

bool Group::is_on_mesh(const Operation& operation) {
  if (operation.call_.algorithm == AlgorithmId::in_network) return false;
  return operation.algorithm_ == nullptr || operation.algorithm_->on_mesh();
}

bool Group::mesh_is_taken() const {
  return std::any_of(active_.begin(), active_.end(), [](const auto& operation) { return is_on_mesh(*operation); });
}

bool Group::updates_shares(const Operation& operation) const {
  // A quantised operation is two calls in a row, and each may update the shares.
  return is_split(operation) &&
         (operation.call_.is_quantised() || shares_->learns_from(operation.call_.choice_bytes()));
}

bool Group::can_start(const Operation& operation) const {
  const auto on_channel = [](const Operation& other) {
    return is_split(other) || other.call_.algorithm == AlgorithmId::in_network;
  };
  // A split operation begins with the switch's part, and takes the mesh after the operations before it. If it updates
  // the shares, it needs the mesh for itself from its start on.
  if ((!on_channel(operation) || updates_shares(operation)) && mesh_is_taken()) return false;
  const auto is_updating = [](const auto& other) { return other->updates_shares_; };
  if (is_split(operation) && std::any_of(active_.begin(), active_.end(), is_updating)) return false;
  if (!on_channel(operation)) return true;
  // A quantised operation is two on the channel, and the second starts when the first is done: at different moments on
  // different ranks. All ranks must start the same operations in the same order, so it has the channel for itself.
  const auto blocks_channel = [&](const auto& other) {
    return on_channel(*other) && (other->call_.is_quantised() || operation.call_.is_quantised());
  };
  const auto has_capacity = [](const auto& path) { return path->can_start(); };
  return std::all_of(switch_paths_.begin(), switch_paths_.end(), has_capacity) &&
         std::none_of(active_.begin(), active_.end(), blocks_channel);
}

void Group::start_next(std::int64_t now) {
  const bool waits_for_mesh = mesh_is_taken();
  queue_.front()->updates_shares_ = updates_shares(*queue_.front());
  if (active_.empty()) begin_oldest(now);
  // Move it to the active operations first: if its algorithm cannot be created, it ends with the group.
  active_.push_back(queue_.front());
  queue_.pop_front();
  Operation& operation = *active_.back();
  operation.record_.started_ns = now;
  operation.algorithm_ =
      collective::make_algorithm(operation.call_, {*mesh_, switch_paths_, node_.get(), hosts_.get(), shares_.get()});
  if (waits_for_mesh && operation.algorithm_ != nullptr) operation.algorithm_->wait_for_mesh();
}

void Group::complete(Operation& operation, Failure failure) {
  EventRecord& record = operation.record_;
  record.finished_ns = now_ns();
  if (record.started_ns == 0) record.started_ns = record.finished_ns;
  if (operation.algorithm_ != nullptr) {
    const auto& counts = operation.algorithm_->counts();
    record.wire_bytes = counts.wire_bytes;
    record.retransmissions = counts.retransmissions;
    record.registration_hits = counts.registrations.hits;
    record.registration_misses = counts.registrations.misses;
    record.slowest_rank = counts.slowest_rank;
    const auto substitute = operation.algorithm_->substitute();
    if (substitute != AlgorithmId::local) record.algorithm = static_cast<std::uint8_t>(substitute);
  }
  record.error = static_cast<std::uint8_t>(failure.kind);
  operation.algorithm_.reset();
  operation.owner_.reset();
  const bool is_programs = !operation.call_.is_internal;
  if (is_programs) status_.completed(operation, failure, active_.size() + queue_.size(), transfers_.size());
  {
    const auto inbox = inbox_.lock();
    record.inlined = inbox->driver == Driver::caller ? 1 : 0;
    if (is_programs) inbox->events.push(record);
    if (shares_ != nullptr && shares_->operations() != inbox->shares->operations()) inbox->shares = *shares_;
    status_.end_operation(record.finished_ns);
  }
  bool notify = false;
  {
    std::lock_guard lock(operation.mutex_);
    operation.failure_ = std::move(failure);
    operation.done_.store(true, std::memory_order_release);
    notify = operation.notify_;
    operation.condition_.notify_all();
  }
  if (notify) engine_.completions.push(operation.id_);
}

void Group::begin_oldest(std::int64_t now) {
  oldest_since_ns_ = now;
  overdue_ns_ = now + kOverdueNs;
}

void Group::check_overdue(const Operation& oldest, std::int64_t now) {
  if (now < overdue_ns_) return;
  const std::int64_t waited_ns = now - oldest_since_ns_;
  overdue_ns_ = now + 2 * waited_ns;
  engine_.async_events.push({.kind = AsyncEvent::Kind::overdue,
                             .group = options_.id,
                             .ranks = oldest.algorithm_->awaited(),
                             .sequence = oldest.call_.sequence,
                             .waited_ns = waited_ns});
}

void Group::ask_unconnected(std::int64_t now) {
  auto ranks = transfers_.lane().to_ask(now);
  if (ranks.empty()) return;
  engine_.async_events.push(
      {.kind = AsyncEvent::Kind::unconnected, .group = options_.id, .ranks = std::move(ranks), .lane = 1});
}

std::int64_t Group::spin_ns() const {
  const auto in_memory = [](const auto& operation) { return operation->call_.algorithm == AlgorithmId::shared_memory; };
  const bool for_memory = std::any_of(active_.begin(), active_.end(), in_memory) || transfers_.waits_for_memory();
  if (!options_.spins_for_sockets && !for_memory) return needs_progress_ ? kDrivenSpinNs : 0;
  return static_cast<std::int64_t>(options_.spin_us) * 1000;
}

void Group::wait_for(collective::WaitSet& set) {
  publish_status();
  if (look_at_users_ns_ >= 0) {
    set.wake_at(look_at_users_ns_);
    return;  // a failed group polls no algorithm
  }
  set.wake_at(close_ns_);
  if (node_ != nullptr && (mesh_is_taken() || !transfers_.empty())) {
    node_->prepare_sleep();
    for (const int doorbell : node_->doorbells()) set.add(doorbell, POLLIN);
    set.look_again = true;
  }
  for (const auto& operation : active_) {
    if (operation->algorithm_ != nullptr) operation->algorithm_->wait_for(set);
    set.wake_at(operation->deadline_ns_);
  }
  if (!active_.empty()) set.wake_at(overdue_ns_);
  for_each_mesh([&](transport::Mesh& mesh) { mesh.wait_to_flush(set.fds); });
  if (!queue_.empty()) set.wake_at(queue_deadline_ns_);
  transfers_.wait_for(set);
}

void Group::publish_status() {
  const Operation* oldest = !active_.empty() ? active_.front().get() : !queue_.empty() ? queue_.front().get() : nullptr;
  const auto is_down = [](const auto& path) { return !path->is_up(); };
  status_.publish({.switch_is_lost = std::any_of(switch_paths_.begin(), switch_paths_.end(), is_down),
                   .collectives = active_.size() + queue_.size(),
                   .oldest = oldest,
                   .transfers = transfers_.size(),
                   .oldest_transfer = transfers_.oldest()});
}

void Group::publish_traffic() {
  if (switch_paths_.empty()) return;
  const auto inbox = inbox_.lock();
  for (std::size_t shard = 0; shard < switch_paths_.size(); ++shard) {
    const collective::Channel& channel = switch_paths_[shard]->channel();
    const protocol::Worker& machine = channel.machine();
    Traffic& traffic = inbox->traffic[shard];
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

}  // namespace netfold::engine
