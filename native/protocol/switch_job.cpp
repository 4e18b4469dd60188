#include <netfold/kernels/reduce.hpp>
#include <netfold/protocol/switch_job.hpp>

#include <cstring>
#include <stdexcept>
#include <string>

namespace netfold::protocol {
namespace {

void append(std::vector<std::byte>& out, const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  out.insert(out.end(), first, first + bytes);
}

template <class T>
void append_value(std::vector<std::byte>& out, T value) {
  append(out, &value, sizeof value);
}

}  // namespace

std::size_t JobConfig::memory_bytes() const {
  const std::size_t slots = 2 * static_cast<std::size_t>(window);
  return slots * (static_cast<std::size_t>(workers) * payload_bytes + kHeaderBytes + payload_bytes + 128);
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
  slots_.resize(slot_count());
  for (std::uint32_t i = 0; i < slot_count(); ++i) slots_[i].chunk = i;
  contributions_.resize(static_cast<std::size_t>(slot_count()) * config.workers * config.payload_bytes);
  frames_.resize(static_cast<std::size_t>(slot_count()) * packet_bytes());
  values_in_frame_.resize(slot_count());
}

Drop SwitchJob::check(const Header& header, std::size_t bytes) const {
  if (bytes != packet_bytes()) return Drop::length;
  if (header.job != config_.job) return Drop::foreign;
  if (header.incarnation != config_.incarnation) return Drop::incarnation;
  if (header.epoch != config_.epoch) return Drop::epoch;
  if (header.flags & (kAnswer | kMismatch | kHello | kNotice)) return Drop::direction;
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
  Handled handled;
  const auto view = PacketView::parse(bytes);
  if (!view) {
    handled.drop = Drop::malformed;
    return handled;
  }
  const Header header = view->header();
  handled.drop = check(header, bytes.size());
  if (handled.drop != Drop::none) return handled;

  handled.worker = header.worker;
  handled.chunk = header.chunk;
  handled.slot = static_cast<std::uint32_t>(header.chunk % slot_count());
  Slot& slot = slots_[handled.slot];
  const auto drop = [&](Drop reason) {
    handled.outcome = Outcome::dropped;
    handled.drop = reason;
    return handled;
  };

  if (header.chunk < slot.chunk) return drop(Drop::stale);
  if (header.chunk > slot.chunk) {
    // Only the next tenant may take the slot, and only when the present one is done (see the argument above).
    if (header.chunk != slot.chunk + slot_count() || !slot.complete) return drop(Drop::window);
    slot = Slot{.chunk = header.chunk};
  }

  const Agreement said = Agreement::of(header);
  if (slot.contributed_count > 0 && said != slot.agreement) {
    handled.outcome = Outcome::mismatch;
    for (std::uint16_t worker = 0; worker < config_.workers; ++worker) {
      if (slot.contributed[worker / 64] >> (worker % 64) & 1) {
        handled.other = worker;
        break;
      }
    }
    return handled;
  }
  if (slot.complete) {
    handled.outcome = Outcome::answered;
    return handled;
  }
  const std::uint64_t bit = std::uint64_t{1} << (header.worker % 64);
  std::uint64_t& word = slot.contributed[header.worker / 64];
  if (word & bit) return drop(Drop::duplicate);

  word |= bit;
  slot.agreement = said;
  slot.non_finite |= (header.flags & kNonFinite) != 0;
  slot.contributed_count = static_cast<std::uint16_t>(slot.contributed_count + 1);
  // Its padding is in no sum: small operations must not pay for long packets.
  std::memcpy(contribution(handled.slot, header.worker), view->payload().data(), said.value_bytes());
  if (slot.contributed_count < config_.workers) {
    handled.outcome = Outcome::stored;
  } else {
    complete(handled.slot, header.worker);
    handled.outcome = Outcome::completed;
  }
  return handled;
}

void SwitchJob::complete(std::uint32_t index, std::uint16_t last_worker) {
  Slot& slot = slots_[index];
  std::array<const void*, kMaxWorkers> sources;
  for (std::uint16_t worker = 0; worker < config_.workers; ++worker) {
    sources[worker] = contribution(index, worker);
  }
  std::byte* frame = frames_.data() + static_cast<std::size_t>(index) * packet_bytes();
  const auto wire = static_cast<kernels::DType>(slot.agreement.wire);
  const std::size_t value_bytes = slot.agreement.value_bytes();
  const std::size_t former_bytes = values_in_frame_[index];
  kernels::reduce(static_cast<kernels::ReduceOp>(slot.agreement.reduce), wire, frame + kHeaderBytes, sources.data(),
                  config_.workers, slot.agreement.count);
  if (former_bytes > value_bytes) std::memset(frame + kHeaderBytes + value_bytes, 0, former_bytes - value_bytes);
  values_in_frame_[index] = static_cast<std::uint32_t>(value_bytes);

  Header answer{.flags = static_cast<std::uint8_t>(kAnswer | (slot.non_finite ? kNonFinite : 0)),
                .job = config_.job,
                .epoch = config_.epoch,
                .incarnation = config_.incarnation,
                .chunk = slot.chunk,
                .counter = ++counter_,
                .worker = last_worker};
  slot.agreement.fill(answer);
  write_header(answer, frame);
  slot.complete = true;
}

std::span<const std::byte> SwitchJob::frame(std::uint32_t slot) const {
  return {frames_.data() + static_cast<std::size_t>(slot) * packet_bytes(), packet_bytes()};
}

void SwitchJob::write_mismatch(std::uint64_t chunk, const Agreement& said, std::uint16_t about, std::uint64_t number,
                               std::byte* out) const {
  Header header{.flags = kAnswer | kMismatch,
                .job = config_.job,
                .epoch = config_.epoch,
                .incarnation = config_.incarnation,
                .chunk = chunk,
                .counter = number,
                .worker = about};
  said.fill(header);
  std::memset(out, 0, packet_bytes());
  write_header(header, out);
}

void SwitchJob::write_notice(std::uint16_t to, const Arrivals::Gap& gap, std::uint64_t number, std::byte* out) const {
  const Header header{.flags = kAnswer | kNotice,
                      .job = config_.job,
                      .epoch = config_.epoch,
                      .incarnation = config_.incarnation,
                      .chunk = gap.first,
                      .counter = number,
                      .elements = gap.count,
                      .worker = to};
  std::memset(out, 0, packet_bytes());
  write_header(header, out);
}

std::vector<std::uint16_t> SwitchJob::missing(std::uint64_t chunk) const {
  std::vector<std::uint16_t> workers;
  const Slot& slot = slots_[chunk % slot_count()];
  const bool next_tenant = chunk == slot.chunk + slot_count();
  if ((slot.chunk != chunk && !next_tenant) || (slot.chunk == chunk && slot.complete)) return workers;
  for (std::uint16_t worker = 0; worker < config_.workers; ++worker) {
    if (next_tenant || !(slot.contributed[worker / 64] >> (worker % 64) & 1)) workers.push_back(worker);
  }
  return workers;
}

std::uint32_t SwitchJob::collecting_count() const {
  std::uint32_t count = 0;
  for (const Slot& slot : slots_) count += !slot.complete && slot.contributed_count > 0;
  return count;
}

std::byte* SwitchJob::contribution(std::uint32_t slot, std::uint16_t worker) {
  const std::size_t index = static_cast<std::size_t>(slot) * config_.workers + worker;
  return contributions_.data() + index * config_.payload_bytes;
}

void SwitchJob::append_canonical(std::vector<std::byte>& out) const {
  append_value(out, config_.job);
  append_value(out, config_.epoch);
  append_value(out, config_.incarnation);
  append_value(out, config_.workers);
  append_value(out, config_.window);
  append_value(out, config_.payload_bytes);
  for (std::uint32_t i = 0; i < slot_count(); ++i) {
    const Slot& slot = slots_[i];
    append_value(out, slot.chunk);
    append_value(out, slot.contributed_count);
    append_value(out, slot.complete);
    append_value(out, slot.non_finite);
    append(out, slot.contributed.data(), sizeof slot.contributed);
    append_value(out, slot.agreement.operation);
    append_value(out, slot.agreement.elements);
    append_value(out, slot.agreement.count);
    append_value(out, slot.agreement.wire);
    append_value(out, slot.agreement.reduce);
    append_value(out, slot.agreement.table);
  }
  append(out, contributions_.data(), contributions_.size());
  append(out, frames_.data(), frames_.size());
  append_value(out, counter_);
}

}  // namespace netfold::protocol
