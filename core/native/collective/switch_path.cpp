#include <netfold/collective/registry.hpp>
#include <netfold/collective/switch_path.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace netfold::collective {
namespace {

// Bytes of an operation's rest that are reduced at a time: bounds the scratch, and is large against a message's cost.
constexpr std::size_t kPartBytes = 4 << 20;
// Elements that are assembled at a time.
constexpr std::size_t kGatherElements = 4096;

}  // namespace

SwitchPath::SwitchPath(std::unique_ptr<Channel> channel, transport::Mesh& fallback, std::vector<Choice> choices,
                       std::uint16_t table)
    : failover_(channel->generation()),
      channel_(std::move(channel)),
      fallback_(fallback),
      choices_(std::move(choices)),
      table_(table),
      ranks_(channel_->ranks()),
      team_(ranks_, static_cast<std::size_t>(std::ranges::find(ranks_, fallback.rank()) - ranks_.begin())) {}

bool SwitchPath::can_start() const {
  return operations_.size() < Channel::kMaxOperations && (!is_up() || channel_->can_start());
}

std::optional<SwitchPath::FrozenState> SwitchPath::freeze(std::uint64_t generation) {
  const auto [which, promised] = failover_.freeze(generation);
  if (which == Failover::Which::none) return std::nullopt;
  Channel& frozen = which == Failover::Which::current ? *channel_ : *next_;
  frozen.freeze();
  return FrozenState{.channel = frozen.receive_state(), .promised = promised};
}

std::optional<std::vector<std::vector<std::byte>>> SwitchPath::kept(std::uint64_t generation,
                                                                    const std::vector<std::uint64_t>& chunks) const {
  if (!failover_.offers_results(generation)) return std::nullopt;
  std::vector<std::vector<std::byte>> packets;
  for (const std::uint64_t chunk : chunks) {
    const auto packet = channel_->kept(chunk);
    if (packet.empty()) return std::nullopt;
    packets.emplace_back(packet.begin(), packet.end());
  }
  return packets;
}

bool SwitchPath::accept(std::uint64_t generation, const std::vector<std::span<const std::byte>>& packets,
                        std::int64_t now_ns) {
  if (!failover_.accepts_results(generation)) return false;
  return std::all_of(packets.begin(), packets.end(),
                     [&](const auto& packet) { return channel_->accept_kept(packet, now_ns); });
}

void SwitchPath::fall_back(std::uint64_t generation, std::uint64_t end, bool promised) {
  const Failover::Which which = failover_.fall_back(generation, end, promised);
  if (which == Failover::Which::standing) next_.reset();
  if (which != Failover::Which::current) return;
  for (FailoverOperation* operation : operations_) operation->leave_channel();
}

void SwitchPath::stand_by(std::unique_ptr<Channel> channel) {
  next_ = std::move(channel);
  failover_.stand_by(next_->generation());
}

FailoverOperation::FailoverOperation(const Call& call, SwitchPath& path)
    : call_(call), path_(path), map_(call, path.team_) {
  if (map_.elements() == 0) return;  // nothing to do, and not in the queue
  number_ = path_.started_++;
  path_.operations_.reserve(path_.operations_.size() + 1);
  if (path_.failover_.start(number_) == Mode::channel) enter_channel();
  path_.operations_.push_back(this);
}

FailoverOperation::~FailoverOperation() {
  if (map_.elements() == 0) return;
  if (token_) path_.channel_->release(*token_);
  std::erase(path_.operations_, this);
  path_.failover_.finish(number_);
}

void FailoverOperation::enter_channel() {
  token_ = path_.channel_->start(call_, map_);
  path_.failover_.entered(number_, on_channel().first_chunk);
}

void FailoverOperation::leave_channel() {
  if (!token_) return;
  if (mode() == Mode::host) {
    rest_ = path_.channel_->missing(*token_);
    staging_.resize(kGatherElements * kernels::element_bytes(map_.wire()));
    zeros_.resize(staging_.size());
  }
  set_counts(on_channel().counts);
  counts_before_ = counts_;
  path_.channel_->release(*token_);
  token_.reset();
}

void FailoverOperation::set_counts(const Counts& of_step) {
  counts_ = counts_before_;
  counts_ += of_step;
}

void FailoverOperation::send_announcement() {
  announced_ = path_.team_.position() == 0 ? path_.failover_.announce() : 0;
  step_call_ = Call{.kind = Kind::broadcast,
                    .algorithm = AlgorithmId::direct,
                    .table = path_.table_,
                    .sequence = call_.sequence,
                    .step_of = call_.step(),
                    .outputs = {{reinterpret_cast<std::byte*>(&announced_), sizeof announced_}}};
  step_ = make_algorithm(step_call_, {.mesh = path_.fallback_}, path_.team_);
}

bool FailoverOperation::apply_announcement() {
  switch (path_.failover_.follow(number_, announced_)) {
    case Failover::Followed::whole:
      is_whole_ = true;
      return true;
    case Failover::Followed::again:
      return true;
    case Failover::Followed::adopted:
      path_.channel_ = std::move(path_.next_);
      for (FailoverOperation* operation : path_.operations_) {
        if (operation->mode() == Mode::channel) operation->enter_channel();
      }
      return true;
    case Failover::Followed::unknown:
      break;
  }
  failure_ = {Failure::Kind::system, path_.team_.rank(0),
              "rank " + std::to_string(path_.team_.rank(0)) +
                  " announced a membership of the switch that this rank has not joined"};
  return false;
}

void FailoverOperation::run(AlgorithmId algorithm) {
  step_call_.algorithm = substitute_ = algorithm;
  step_call_.between = AlgorithmId::local;
  step_call_.table = path_.table_;
  step_ = make_algorithm(step_call_, {.mesh = path_.fallback_}, path_.team_);
}

void FailoverOperation::deliver_part() {
  const std::byte* values = scratch_.data();
  for (const Range& range : part_) {
    map_.deliver(range.first, range.count, values);
    values += range.count * kernels::element_bytes(map_.wire());
  }
  part_.clear();
}

bool FailoverOperation::start_next_part() {
  if (is_whole_) {
    if (std::exchange(is_done_, true)) return false;
    step_call_ = call_;
    run(choose(path_.choices_, call_.kind, call_.choice_bytes()).algorithm);
    return true;
  }
  deliver_part();
  const std::size_t element_bytes = kernels::element_bytes(map_.wire());
  std::size_t free_elements = kPartBytes / element_bytes;
  scratch_.resize(std::max(scratch_.size(), kPartBytes));
  std::byte* next = scratch_.data();
  while (free_elements > 0 && !rest_.empty()) {
    Range& left = rest_.front();
    const Range taken{left.first, std::min(left.count, free_elements)};
    for (std::size_t first = taken.first; first < taken.first + taken.count; first += kGatherElements) {
      const std::size_t count = std::min(kGatherElements, taken.first + taken.count - first);
      const std::byte* values = map_.contribution(first, count, staging_.data(), zeros_.data());
      std::memcpy(next, values, count * element_bytes);
      next += count * element_bytes;
    }
    part_.push_back(taken);
    free_elements -= taken.count;
    left = {left.first + taken.count, left.count - taken.count};
    if (left.count == 0) rest_.erase(rest_.begin());
  }
  if (part_.empty()) return false;
  const Buffer values{scratch_.data(), static_cast<std::size_t>(next - scratch_.data())};
  step_call_ = Call{.kind = Kind::all_reduce,
                    .dtype = map_.wire(),
                    .reduce = map_.reduce(),
                    .wire = map_.wire(),
                    .sequence = call_.sequence,
                    .step_of = call_.step(),
                    .outputs = {values}};
  run(choose(path_.choices_, Kind::all_reduce, values.bytes).algorithm);
  return true;
}

Progress FailoverOperation::poll(std::int64_t now_ns) {
  if (map_.elements() == 0) return Progress::done;
  bool moved = false;
  for (;;) {
    if (mode() == Mode::channel) {
      const Progress progress = path_.channel_->poll(now_ns);
      set_counts(on_channel().counts);
      if (on_channel().finished) return Progress::done;
      if (progress == Progress::failed) return fail(path_.channel_->failure());
      return progress == Progress::idle && moved ? Progress::moved : progress;
    }
    if (step_ == nullptr) {
      if (path_.failover_.host_operation() != number_) return moved ? Progress::moved : Progress::idle;
      if (mode() == Mode::undecided) {
        send_announcement();
      } else if (!start_next_part()) {
        return Progress::done;
      }
    }
    const Progress progress = step_->poll(now_ns);
    set_counts(step_->counts());
    if (progress == Progress::failed) return fail(step_->failure());
    if (progress != Progress::done) return moved ? Progress::moved : progress;
    moved = true;
    counts_before_ = counts_;
    step_.reset();
    if (mode() == Mode::undecided && !apply_announcement()) return Progress::failed;
  }
}

void FailoverOperation::wait_for(WaitSet& set) const {
  if (step_ != nullptr) return step_->wait_for(set);
  if (token_) path_.channel_->wait_for(set);
}

std::vector<int> FailoverOperation::awaited() const { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

}  // namespace netfold::collective
