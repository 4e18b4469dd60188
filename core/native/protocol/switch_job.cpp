#include <netfold/kernels/reduce.hpp>
#include <netfold/protocol/canonical.hpp>
#include <netfold/protocol/switch_job.hpp>

#include <cstring>
#include <stdexcept>
#include <string>

namespace netfold::protocol {
namespace {

// The order of addition that makes the sum's bits independent of the order of arrival.
enum class SumOrder {
  any,        // integers, which wrap
  by_worker,  // one by one, in the order of workers
  together,   // in one pass over all: accumulated in f32 and rounded once
};

SumOrder sum_order_of(const CallDescriptor& call) {
  switch (static_cast<kernels::DType>(call.wire)) {
    case kernels::DType::f16:
    case kernels::DType::bf16:
      return SumOrder::together;
    case kernels::DType::f32:
    case kernels::DType::f64:
    case kernels::DType::f64_i64:
    case kernels::DType::i64_i64:
      return SumOrder::by_worker;
    default:
      return SumOrder::any;
  }
}

}  // namespace

std::size_t JobConfig::memory_bytes() const {
  const std::size_t packets = parent ? 2 : 1;  // the result, and the sum to the parent
  return slots() * (static_cast<std::size_t>(workers) * payload_bytes + packets * (kHeaderBytes + payload_bytes) + 128);
}

SwitchJob::SwitchJob(const JobConfig& config) : config_(config) {
  if (config.workers == 0 || config.workers > kMaxWorkers) {
    throw std::invalid_argument("a job has 1 to " + std::to_string(kMaxWorkers) + " workers, not " +
                                std::to_string(config.workers));
  }
  if (config.window == 0 || config.window > kMaxWindow) {
    throw std::invalid_argument("a job's window is 1 to " + std::to_string(kMaxWindow) + " chunks, not " +
                                std::to_string(config.window));
  }
  if (config.payload_bytes == 0 || config.payload_bytes % 8 != 0 || config.payload_bytes > kMaxPayloadBytes) {
    throw std::invalid_argument("payload_bytes is a multiple of 8 up to " + std::to_string(kMaxPayloadBytes) +
                                ", not " + std::to_string(config.payload_bytes));
  }
  if (!config.names.empty() && config.names.size() != config.workers) {
    throw std::invalid_argument("a job of " + std::to_string(config.workers) + " workers has as many names, not " +
                                std::to_string(config.names.size()));
  }
  slots_.resize(slot_count());
  for (std::uint32_t i = 0; i < slot_count(); ++i) slots_[i].chunk = i;
  contributions_.resize(static_cast<std::size_t>(slot_count()) * config.workers * config.payload_bytes);
  frames_.resize(static_cast<std::size_t>(slot_count()) * packet_bytes());
  if (config.parent) {
    sums_.resize(frames_.size());
    values_in_sum_.resize(slot_count());
  }
  values_in_frame_.resize(slot_count());
}

Drop SwitchJob::check(const Header& header, std::size_t bytes) const {
  if (bytes != packet_bytes()) return Drop::length;
  if (header.job != config_.job) return Drop::foreign;
  if (header.incarnation != config_.incarnation) return Drop::incarnation;
  if (header.epoch != config_.epoch) return Drop::epoch;
  if (header.flags & (kFromSwitch | kMismatch | kHello | kNack)) return Drop::direction;
  if (header.worker >= config_.workers) return Drop::worker;
  const auto wire = static_cast<kernels::DType>(header.wire);
  const auto reduce = static_cast<kernels::ReduceOp>(header.reduce);
  if (header.count == 0 || header.count * kernels::element_bytes(wire) > config_.payload_bytes ||
      !kernels::is_defined(reduce, wire)) {
    return Drop::malformed;
  }
  return Drop::none;
}

SwitchJob::Handled SwitchJob::handle_packet(std::span<const std::byte> bytes) {
  const auto view = PacketView::parse(bytes);
  return view ? handle_packet(view->header(), bytes) : Handled{.drop = Drop::malformed};
}

SwitchJob::Handled SwitchJob::handle_parent(std::span<const std::byte> bytes) {
  const auto view = PacketView::parse(bytes);
  return view ? handle_parent(view->header(), bytes) : Handled{.drop = Drop::malformed};
}

SwitchJob::Handled SwitchJob::handle_packet(const Header& header, std::span<const std::byte> bytes) {
  Handled handled;
  handled.drop = check(header, bytes.size());
  if (handled.drop != Drop::none) return handled;

  handled.worker = header.worker;
  handled.chunk = header.chunk;
  handled.slot = slot_of(header.chunk);
  Slot& slot = slots_[handled.slot];
  const auto drop = [&](Drop reason) {
    handled.outcome = Outcome::dropped;
    handled.drop = reason;
    return handled;
  };

  if (header.chunk < slot.chunk) return drop(Drop::stale);
  if (header.chunk > slot.chunk) {
    // Only the next tenant may take the slot, and only when the present one is complete (switch_job.hpp).
    if (header.chunk != slot.chunk + slot_count() || !slot.complete) return drop(Drop::window);
    slot = Slot{.chunk = header.chunk};
  }

  const CallDescriptor call = CallDescriptor::of(header);
  if (slot.contributed_count > 0 && call != slot.descriptor) {
    handled.outcome = Outcome::mismatch;
    while (!has_contributed(slot, handled.other)) ++handled.other;
    return handled;
  }
  if (slot.complete) {
    handled.outcome = Outcome::resend_result;
    return handled;
  }
  const std::uint64_t bit = std::uint64_t{1} << (header.worker % 64);
  std::uint64_t& word = slot.contributed[header.worker / 64];
  if (word & bit) {
    if (!summed(slot)) return drop(Drop::duplicate);
    handled.outcome = Outcome::resend_sum;
    return handled;
  }

  word |= bit;
  slot.descriptor = call;
  slot.contributed_count = static_cast<std::uint16_t>(slot.contributed_count + 1);
  const std::byte* values = bytes.data() + kHeaderBytes;
  if (slot.contributed_count < config_.workers) {
    add_contribution(handled.slot, header.worker, values);
    handled.outcome = Outcome::stored;
  } else if (config_.parent) {
    finish(handled.slot, header.worker, values, sum_at(handled.slot), values_in_sum_[handled.slot]);
    handled.outcome = Outcome::summed;
  } else {
    finish(handled.slot, header.worker, values, frame_at(handled.slot), values_in_frame_[handled.slot]);
    complete(handled.slot, name_of(header.worker));
    handled.outcome = Outcome::completed;
  }
  return handled;
}

Drop SwitchJob::check_parent(const Header& header, std::size_t bytes) const {
  if (bytes != packet_bytes()) return Drop::length;
  if (header.job != config_.parent->job) return Drop::foreign;
  if (header.incarnation != config_.parent->incarnation) return Drop::incarnation;
  if (header.epoch != config_.parent->epoch) return Drop::epoch;
  if (!(header.flags & kFromSwitch) || (header.flags & kHello)) return Drop::direction;
  return Drop::none;
}

SwitchJob::Handled SwitchJob::handle_parent(const Header& header, std::span<const std::byte> bytes) {
  Handled handled;
  const auto drop = [&](Drop reason) {
    handled.drop = reason;
    return handled;
  };
  if (const Drop reason = check_parent(header, bytes.size()); reason != Drop::none) return drop(reason);
  handled.chunk = header.chunk;
  handled.worker = header.worker;
  if (header.flags & kNack) {
    if (header.worker != config_.parent->worker) return drop(Drop::worker);
    if (header.count != 0 || header.elements == 0) return drop(Drop::malformed);
    handled.outcome = Outcome::nack;
    return handled;
  }
  handled.slot = slot_of(header.chunk);
  Slot& slot = slots_[handled.slot];
  if (slot.chunk > header.chunk) return drop(Drop::stale);
  if (slot.chunk == header.chunk && slot.complete) return drop(Drop::duplicate);
  if (header.flags & kMismatch) {
    handled.outcome = Outcome::mismatch;
    return handled;
  }
  // A result without this switch's own sum is of no chunk of this epoch.
  if (header.chunk != slot.chunk || !summed(slot)) return drop(Drop::window);
  // The parent compared all sums, this switch's among them.
  if (CallDescriptor::of(header) != slot.descriptor) return drop(Drop::malformed);
  const std::size_t value_bytes = slot.descriptor.value_bytes();
  std::memcpy(frame_at(handled.slot) + kHeaderBytes, bytes.data() + kHeaderBytes, value_bytes);
  clear_behind(frame_at(handled.slot), values_in_frame_[handled.slot], value_bytes);
  complete(handled.slot, header.worker);
  handled.outcome = Outcome::completed;
  return handled;
}

void SwitchJob::add_contribution(std::uint32_t index, std::uint16_t worker, const std::byte* values) {
  Slot& slot = slots_[index];
  const SumOrder order = sum_order_of(slot.descriptor);
  // Without the padding: small operations must not pay for long packets.
  const auto keep_at = [&](std::uint16_t place) {
    std::memcpy(contribution(index, place), values, slot.descriptor.value_bytes());
  };
  if (order == SumOrder::any) {
    if (slot.contributed_count == 1) return keep_at(0);
    const std::array<const void*, 2> both{contribution(index, 0), values};
    return reduce(slot, contribution(index, 0), both);
  }
  if (order == SumOrder::together || worker != slot.added) return keep_at(worker);
  std::array<const void*, kMaxWorkers> sources;
  std::uint16_t last = worker;
  while (has_contributed(slot, static_cast<std::uint16_t>(last + 1))) ++last;
  const std::size_t count = sources_of(index, worker, values, last, sources);
  slot.added = static_cast<std::uint16_t>(last + 1);
  if (count == 1) return keep_at(0);
  reduce(slot, contribution(index, 0), {sources.data(), count});
}

void SwitchJob::finish(std::uint32_t index, std::uint16_t worker, const std::byte* values, std::byte* packet,
                       std::uint32_t& in_packet) {
  const Slot& slot = slots_[index];
  std::array<const void*, kMaxWorkers> sources;
  std::size_t count = 0;
  if (sum_order_of(slot.descriptor) == SumOrder::any) {
    if (config_.workers > 1) sources[count++] = contribution(index, 0);
    sources[count++] = values;
  } else {
    count = sources_of(index, worker, values, static_cast<std::uint16_t>(config_.workers - 1), sources);
  }
  reduce(slot, packet + kHeaderBytes, {sources.data(), count});
  clear_behind(packet, in_packet, slot.descriptor.value_bytes());
}

std::size_t SwitchJob::sources_of(std::uint32_t index, std::uint16_t worker, const std::byte* values,
                                  std::uint16_t last, std::array<const void*, kMaxWorkers>& sources) const {
  const std::uint16_t added = slots_[index].added;
  std::size_t count = 0;
  if (added > 0) sources[count++] = contribution(index, 0);
  for (std::uint16_t from = added; from <= last; ++from) {
    sources[count++] = from == worker ? values : contribution(index, from);
  }
  return count;
}

void SwitchJob::reduce(const Slot& slot, std::byte* to, std::span<const void* const> sources) {
  kernels::reduce(static_cast<kernels::ReduceOp>(slot.descriptor.reduce),
                  static_cast<kernels::DType>(slot.descriptor.wire), to, sources.data(), sources.size(),
                  slot.descriptor.count);
}

void SwitchJob::clear_behind(std::byte* packet, std::uint32_t& values, std::size_t value_bytes) {
  if (values > value_bytes) std::memset(packet + kHeaderBytes + value_bytes, 0, values - value_bytes);
  values = static_cast<std::uint32_t>(value_bytes);
}

void SwitchJob::complete(std::uint32_t index, std::uint16_t last_worker) {
  Slot& slot = slots_[index];
  Header result{.flags = kFromSwitch,
                .job = config_.job,
                .epoch = config_.epoch,
                .incarnation = config_.incarnation,
                .chunk = slot.chunk,
                .packet_number = ++packet_number_,
                .worker = last_worker};
  slot.descriptor.fill(result);
  write_header(result, frame_at(index));
  slot.complete = true;
}

std::span<const std::byte> SwitchJob::sum(std::uint32_t index, std::uint64_t packet_number) {
  const Slot& slot = slots_[index];
  Header header{.job = config_.parent->job,
                .epoch = config_.parent->epoch,
                .incarnation = config_.parent->incarnation,
                .chunk = slot.chunk,
                .packet_number = packet_number,
                .worker = config_.parent->worker};
  slot.descriptor.fill(header);
  write_header(header, sum_at(index));
  return {sum_at(index), packet_bytes()};
}

std::span<const std::byte> SwitchJob::frame(std::uint32_t slot) const {
  return {frames_.data() + static_cast<std::size_t>(slot) * packet_bytes(), packet_bytes()};
}

void SwitchJob::write_mismatch(std::uint64_t chunk, const CallDescriptor& call, std::uint16_t about,
                               std::uint64_t number, std::byte* out) const {
  Header header{.flags = kFromSwitch | kMismatch,
                .job = config_.job,
                .epoch = config_.epoch,
                .incarnation = config_.incarnation,
                .chunk = chunk,
                .packet_number = number,
                .worker = about};
  call.fill(header);
  std::memset(out, 0, packet_bytes());
  write_header(header, out);
}

void SwitchJob::write_nack(std::uint16_t to, const GapDetector::Gap& gap, std::uint64_t number, std::byte* out) const {
  const Header header{.flags = kFromSwitch | kNack,
                      .job = config_.job,
                      .epoch = config_.epoch,
                      .incarnation = config_.incarnation,
                      .chunk = gap.first,
                      .packet_number = number,
                      .elements = gap.count,
                      .worker = to};
  std::memset(out, 0, packet_bytes());
  write_header(header, out);
}

std::vector<std::uint16_t> SwitchJob::missing(std::uint64_t chunk) const {
  std::vector<std::uint16_t> workers;
  const Slot& slot = slots_[slot_of(chunk)];
  const bool next_tenant = chunk == slot.chunk + slot_count();
  if ((slot.chunk != chunk && !next_tenant) || (slot.chunk == chunk && slot.complete)) return workers;
  for (std::uint16_t worker = 0; worker < config_.workers; ++worker) {
    if (next_tenant || !has_contributed(slot, worker)) workers.push_back(worker);
  }
  return workers;
}

std::uint32_t SwitchJob::collecting_count() const {
  std::uint32_t count = 0;
  for (const Slot& slot : slots_) count += !slot.complete && !summed(slot) && slot.contributed_count > 0;
  return count;
}

std::uint32_t SwitchJob::summed_count() const {
  std::uint32_t count = 0;
  for (const Slot& slot : slots_) count += summed(slot);
  return count;
}

const std::byte* SwitchJob::contribution(std::uint32_t slot, std::uint16_t worker) const {
  const std::size_t index = static_cast<std::size_t>(worker) * slot_count() + slot;
  return contributions_.data() + index * config_.payload_bytes;
}

bool SwitchJob::keeps(const Slot& slot, std::uint16_t worker) const {
  if (slot.contributed_count == 0 || slot.contributed_count == config_.workers) return false;
  switch (sum_order_of(slot.descriptor)) {
    case SumOrder::any:
      return worker == 0;
    case SumOrder::by_worker:
      return (worker == 0 || worker >= slot.added) && has_contributed(slot, worker);
    case SumOrder::together:
      return has_contributed(slot, worker);
  }
  return false;
}

void SwitchJob::append_canonical(std::vector<std::byte>& out) const {
  append_values(out, config_.job, config_.epoch, config_.incarnation, config_.workers, config_.window,
                config_.payload_bytes, config_.parent.has_value());
  if (const auto& parent = config_.parent) {
    append_values(out, parent->job, parent->epoch, parent->incarnation, parent->worker);
  }
  append_bytes(out, config_.names.data(), config_.names.size() * sizeof(std::uint16_t));
  for (std::uint32_t i = 0; i < slot_count(); ++i) {
    const Slot& slot = slots_[i];
    const CallDescriptor& call = slot.descriptor;
    append_values(out, slot.chunk, slot.contributed_count, slot.complete);
    append_bytes(out, slot.contributed.data(), sizeof slot.contributed);
    append_values(out, call.operation, call.elements, call.count, call.wire, call.reduce, call.table);
    // Bytes behind the values, and those of former tenants, are read no more.
    for (std::uint16_t worker = 0; worker < config_.workers; ++worker) {
      if (keeps(slot, worker)) append_bytes(out, contribution(i, worker), call.value_bytes());
    }
  }
  append_bytes(out, frames_.data(), frames_.size());
  append_bytes(out, sums_.data(), sums_.size());
  append_values(out, packet_number_);
}

}  // namespace netfold::protocol
