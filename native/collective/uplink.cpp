#include <netfold/collective/direct.hpp>
#include <netfold/collective/registry.hpp>
#include <netfold/collective/uplink.hpp>

#include <algorithm>
#include <cstring>

namespace netfold::collective {
namespace {

// Of all ranges but the last, laid side by side: where each lies there and in the tensor, in bytes. Returns their sum.
template <class Visit>
std::size_t visit_apart(const std::vector<Range>& ranges, std::size_t element_bytes, Visit visit) {
  std::size_t at = 0;
  for (std::size_t i = 0; i + 1 < ranges.size(); ++i) {
    const std::size_t bytes = ranges[i].count * element_bytes;
    visit(at, ranges[i].first * element_bytes, bytes);
    at += bytes;
  }
  return at;
}

}  // namespace

Uplink::Uplink(std::unique_ptr<Channel> channel, transport::Mesh& spare, std::vector<Row> rows, std::uint16_t table)
    : channel_(std::move(channel)),
      spare_(spare),
      rows_(std::move(rows)),
      table_(table),
      team_(channel_->ranks(), spare.rank()) {}

bool Uplink::can_start() const {
  return line_.size() < Channel::kMaxOperations && (channel_->frozen() || channel_->can_start());
}

std::optional<Uplink::Words> Uplink::freeze(std::uint64_t life) {
  if (channel_->life() == life) {
    channel_->freeze();
    return Words{.of_channel = channel_->words(), .promised = true};
  }
  if (next_ == nullptr || next_->life() != life) return std::nullopt;
  next_->freeze();
  return Words{.of_channel = next_->words(), .promised = said_ == life};
}

std::optional<std::vector<std::vector<std::byte>>> Uplink::kept(std::uint64_t life,
                                                                const std::vector<std::uint64_t>& chunks) const {
  if (channel_->life() != life) return std::nullopt;
  std::vector<std::vector<std::byte>> packets;
  for (const std::uint64_t chunk : chunks) {
    const auto packet = channel_->kept(chunk);
    if (packet.empty()) return std::nullopt;
    packets.emplace_back(packet.begin(), packet.end());
  }
  return packets;
}

bool Uplink::accept(std::uint64_t life, const std::vector<std::span<const std::byte>>& packets, std::int64_t now_ns) {
  if (channel_->life() != life || !channel_->frozen() || down_) return false;
  return std::all_of(packets.begin(), packets.end(),
                     [&](const auto& packet) { return channel_->accept(packet, now_ns); });
}

void Uplink::fall_back(std::uint64_t life, std::uint64_t end, bool promised) {
  if (channel_->life() == life) {
    if (down_) return;
    down_ = true;
    for (Uplinked* operation : line_) operation->fall_back(end);
    return;
  }
  if (next_ != nullptr && next_->life() == life) next_.reset();
  if (promised) gone_.push_back(life);
}

bool Uplink::promise(std::uint64_t life) {
  if (next_ == nullptr || next_->life() != life || next_->frozen()) return false;
  promised_ = life;
  return true;
}

std::uint64_t Uplink::word() {
  if (next_ == nullptr || next_->life() != promised_ || next_->frozen()) return 0;
  return said_ = promised_;
}

bool Uplink::adopt(std::uint64_t life) {
  const auto gone = std::find(gone_.begin(), gone_.end(), life);
  if (gone != gone_.end()) {
    gone_.erase(gone);
    return true;
  }
  if (next_ == nullptr || next_->life() != life) return false;
  channel_ = std::move(next_);
  down_ = false;
  if (channel_->frozen()) return true;
  for (Uplinked* operation : line_) {
    if (operation->way_ == Uplinked::Way::word) operation->enter_channel();
  }
  return true;
}

bool Uplink::turn_of(const Uplinked& operation) const {
  const auto waits = [](const Uplinked* other) { return other->way_ != Uplinked::Way::channel; };
  return down_ && *std::find_if(line_.begin(), line_.end(), waits) == &operation;
}

AlgorithmId Uplink::choose(Kind kind, std::size_t bytes) const {
  AlgorithmId chosen = AlgorithmId::direct;
  for (const Row& row : rows_) {
    if (row.kind == kind && row.min_bytes <= bytes) chosen = row.algorithm;
  }
  return chosen;
}

Uplinked::Uplinked(const Call& call, Uplink& uplink, int ranks) : call_(call), uplink_(uplink), ranks_(ranks) {
  if (uplink_.is_up()) enter_channel();
  uplink_.line_.push_back(this);
}

Uplinked::~Uplinked() { std::erase(uplink_.line_, this); }

void Uplinked::enter_channel() {
  way_ = Way::channel;
  in_network_ = std::make_unique<InNetwork>(call_, *uplink_.channel_, ranks_);
}

void Uplinked::fall_back(std::uint64_t end) {
  if (way_ != Way::channel) return;
  const bool begun_by_all = uplink_.channel_->first_chunk(in_network_->token()) < end;
  way_ = begun_by_all ? Way::host : Way::word;
  if (begun_by_all) rest_ = uplink_.channel_->missing(in_network_->token());
  take_counts(*in_network_);
  wire_bytes_before_ = wire_bytes_;
  retransmissions_before_ = retransmissions_;
  in_network_.reset();
}

void Uplinked::take_counts(const Algorithm& of) {
  wire_bytes_ = wire_bytes_before_ + of.wire_bytes();
  retransmissions_ = retransmissions_before_ + of.retransmissions();
  if (of.slowest_rank() >= 0) slowest_rank_ = of.slowest_rank();
}

void Uplinked::say_word() {
  word_ = uplink_.team_.position() == 0 ? uplink_.word() : 0;
  step_call_ = Call{.kind = Kind::broadcast,
                    .algorithm = AlgorithmId::direct,
                    .table = uplink_.table_,
                    .sequence = call_.sequence,
                    .step_of = static_cast<std::uint8_t>(1 + static_cast<int>(call_.kind)),
                    .outputs = {{reinterpret_cast<std::byte*>(&word_), sizeof word_}}};
  step_ = make_algorithm(step_call_, {.mesh = uplink_.spare_}, uplink_.team_);
}

bool Uplinked::follow_word() {
  if (word_ == 0) {
    way_ = Way::host;
    rest_ = {{0, call_.elements()}};
    return true;
  }
  if (uplink_.adopt(word_)) return true;
  failure_ = {Failure::Kind::system, uplink_.team_.rank(0),
              "rank " + std::to_string(uplink_.team_.rank(0)) +
                  " goes on by a membership of the switch that this rank has not joined"};
  return false;
}

void Uplinked::reduce(const Buffer& part) {
  step_call_ = call_;
  step_call_.algorithm = instead_ = uplink_.choose(call_.kind, part.bytes);
  step_call_.between = AlgorithmId::local;
  step_call_.average = false;
  step_call_.table = uplink_.table_;
  step_call_.outputs = {part};
  step_ = make_algorithm(step_call_, {.mesh = uplink_.spare_}, uplink_.team_);
}

bool Uplinked::start_next_part() {
  const std::size_t element_bytes = kernels::element_bytes(call_.dtype);
  std::byte* data = call_.outputs[0].data;
  if (scratch_ != nullptr) {
    visit_apart(rest_, element_bytes, [&](std::size_t at, std::size_t in_tensor, std::size_t bytes) {
      std::memcpy(data + in_tensor, scratch_.get() + at, bytes);
    });
    scratch_.reset();
    rest_ = {rest_.back()};
  }
  if (rest_.empty()) return false;
  if (rest_.size() == 1) {
    reduce({data + rest_[0].first * element_bytes, rest_[0].count * element_bytes});
    rest_.clear();
    return true;
  }
  const std::size_t sum = visit_apart(rest_, element_bytes, [](std::size_t, std::size_t, std::size_t) {});
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(sum);
  visit_apart(rest_, element_bytes, [&](std::size_t at, std::size_t in_tensor, std::size_t bytes) {
    std::memcpy(scratch_.get() + at, data + in_tensor, bytes);
  });
  reduce({scratch_.get(), sum});
  return true;
}

Progress Uplinked::poll(std::int64_t now_ns) {
  bool moved = false;
  for (;;) {
    if (way_ == Way::channel) {
      const Progress progress = in_network_->poll(now_ns);
      take_counts(*in_network_);
      if (progress == Progress::failed) return fail(in_network_->failure());
      return progress == Progress::idle && moved ? Progress::moved : progress;
    }
    if (step_ == nullptr) {
      if (!uplink_.turn_of(*this)) return moved ? Progress::moved : Progress::idle;
      if (way_ == Way::word) {
        say_word();
      } else if (!start_next_part()) {
        if (call_.average) divide(call_.dtype, call_.outputs[0], ranks_);
        return Progress::done;
      }
    }
    const Progress progress = step_->poll(now_ns);
    take_counts(*step_);
    if (progress == Progress::failed) return fail(step_->failure());
    if (progress != Progress::done) return moved ? Progress::moved : progress;
    moved = true;
    wire_bytes_before_ = wire_bytes_;
    retransmissions_before_ = retransmissions_;
    step_.reset();
    if (way_ == Way::word && !follow_word()) return Progress::failed;
  }
}

void Uplinked::wait_for(WaitSet& set) const {
  if (step_ != nullptr) return step_->wait_for(set);
  if (in_network_ != nullptr) in_network_->wait_for(set);
}

std::vector<int> Uplinked::awaited() const { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

}  // namespace netfold::collective
