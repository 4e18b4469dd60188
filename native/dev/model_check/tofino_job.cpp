#include "tofino_job.hpp"

#include <netfold/protocol/canonical.hpp>

#include <cstring>

namespace netfold::model_check {

using protocol::CallDescriptor;
using protocol::Drop;
using protocol::Header;

TofinoJob::TofinoJob(const protocol::JobConfig& config, std::uint32_t chunk_bits)
    : config_(config), chunk_bits_(chunk_bits) {
  for (std::uint32_t slot = 0; slot < config.slots(); ++slot) {
    slots_.push_back({.chunk = std::int64_t{slot} - config.slots(), .workers = all(), .call = {}});
  }
  sums_.resize(config.slots() * (config.payload_bytes / sizeof(std::uint32_t)));
}

std::int64_t TofinoJob::compared(std::uint64_t number) const {
  return static_cast<std::int64_t>(number << (64 - chunk_bits_)) >> (64 - chunk_bits_);
}

// As `Check` in native/p4/shared.p4.
Drop TofinoJob::check(const Header& header, std::size_t bytes) const {
  if (bytes != protocol::kHeaderBytes + config_.payload_bytes) return Drop::length;
  if (header.flags != 0) return Drop::direction;
  if (header.worker >= config_.workers) return Drop::worker;
  if (header.job != config_.job) return Drop::foreign;
  if (header.incarnation != config_.incarnation) return Drop::incarnation;
  if (header.epoch != config_.epoch) return Drop::epoch;
  const bool adds = header.wire == static_cast<std::uint8_t>(kernels::DType::u32) &&
                    header.reduce == static_cast<std::uint8_t>(kernels::ReduceOp::sum);
  if (!adds || header.count == 0 || header.count > config_.payload_bytes / sizeof(std::uint32_t)) {
    return Drop::malformed;
  }
  return Drop::none;
}

TofinoJob::Handled TofinoJob::handle_packet(std::span<std::byte> packet) {
  Handled handled;
  const auto view = protocol::PacketView::parse(packet);
  handled.drop = view ? check(view->header(), packet.size()) : Drop::malformed;
  if (handled.drop != Drop::none) return handled;
  Header header = view->header();
  handled.chunk = header.chunk;
  handled.worker = header.worker;
  handled.slot = slot_of(header.chunk);
  Slot& slot = slots_[handled.slot];

  // slot_chunk
  const std::int64_t chunk = compared(header.chunk);
  const std::int64_t before = slot.chunk;
  if (slot.chunk < chunk) slot.chunk = chunk;
  const std::int64_t ahead = compared(static_cast<std::uint64_t>(chunk - before));
  if (ahead < 0) {
    handled.drop = Drop::stale;
    return handled;
  }
  const bool opens = ahead != 0;
  // slot_operation, slot_elements, slot_shape, slot_choices
  const CallDescriptor call = CallDescriptor::of(header);
  if (opens) slot.call = call;
  if (slot.call != call) {
    handled.outcome = Outcome::mismatch;
  } else {
    // slot_workers
    const std::uint32_t member = std::uint32_t{1} << header.worker;
    const std::uint32_t had = opens ? 0 : slot.workers;
    slot.workers = had | member;
    if (had == all()) {
      handled.outcome = Outcome::resend_result;
    } else if ((had & member) != 0) {
      handled.drop = Drop::duplicate;
      return handled;
    } else {
      handled.outcome = slot.workers == all() ? Outcome::completed : Outcome::stored;
    }
  }
  // sum_0 to sum_31
  const std::uint32_t values = config_.payload_bytes / sizeof(std::uint32_t);
  for (std::uint32_t at = 0; at < values; ++at) {
    std::uint32_t& sum = sums_[handled.slot * values + at];
    std::uint32_t value;
    std::byte* in_packet = packet.data() + protocol::kHeaderBytes + at * sizeof value;
    std::memcpy(&value, in_packet, sizeof value);
    if (handled.outcome == Outcome::mismatch) {
      value = 0;
    } else {
      if (handled.outcome != Outcome::resend_result) sum = opens ? value : sum + value;
      value = sum;
    }
    std::memcpy(in_packet, &value, sizeof value);
  }

  const std::uint16_t name = config_.names.empty() ? header.worker : config_.names[header.worker];
  header.flags = protocol::kFromSwitch;
  if (handled.outcome == Outcome::completed) {
    slot.number = ++results_;
    slot.last = name;
  }
  if (handled.outcome == Outcome::mismatch) {
    header.flags |= protocol::kMismatch;
    header.worker = name;
    header.packet_number = 0;
  } else {
    header.worker = slot.last;
    header.packet_number = slot.number;
  }
  if (handled.outcome != Outcome::stored) protocol::write_header(header, packet.data());
  return handled;
}

std::vector<std::uint16_t> TofinoJob::missing(std::uint64_t chunk) const {
  std::vector<std::uint16_t> workers;
  const Slot& slot = slots_[slot_of(chunk)];
  const std::int64_t ahead = compared(static_cast<std::uint64_t>(compared(chunk) - slot.chunk));
  for (std::uint16_t worker = 0; worker < config_.workers && ahead >= 0; ++worker) {
    if (ahead > 0 || (slot.workers >> worker & 1) == 0) workers.push_back(worker);
  }
  return workers;
}

void TofinoJob::append_canonical(std::vector<std::byte>& out) const {
  protocol::append_values(out, config_.job, config_.epoch, config_.incarnation, config_.workers, config_.window,
                          config_.payload_bytes, chunk_bits_);
  for (const Slot& slot : slots_) {
    protocol::append_values(out, slot.chunk, slot.workers, slot.call.operation, slot.call.elements, slot.call.count,
                            slot.call.wire, slot.call.reduce, slot.call.table, slot.number, slot.last);
  }
  protocol::append_bytes(out, sums_.data(), sums_.size() * sizeof(std::uint32_t));
  protocol::append_values(out, results_);
}

}  // namespace netfold::model_check
