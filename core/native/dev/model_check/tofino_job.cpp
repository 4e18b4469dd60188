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
    slots_.push_back({.chunk = std::int64_t{slot} - config.slots(), .has_result = true, .workers = all(), .call = {}});
  }
  sums_.resize(config.slots() * (config.payload_bytes / sizeof(std::uint32_t)));
}

std::int64_t TofinoJob::compared(std::uint64_t number) const {
  return static_cast<std::int64_t>(number << (64 - chunk_bits_)) >> (64 - chunk_bits_);
}

std::uint32_t TofinoJob::slot_of(std::uint64_t chunk) const {
  return static_cast<std::uint32_t>(chunk) & (config_.slots() - 1);
}

// As `Check` in core/native/p4/shared.p4.
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

Drop TofinoJob::check_parent(const Header& header) const {
  if (header.job != config_.parent->job) return Drop::foreign;
  if (header.incarnation != config_.parent->incarnation) return Drop::incarnation;
  if (header.epoch != config_.parent->epoch) return Drop::epoch;
  return (header.flags & (protocol::kFromSwitch | protocol::kHello)) == protocol::kFromSwitch ? Drop::none
                                                                                              : Drop::direction;
}

void TofinoJob::enter(const Header& header, bool from_parent, Handled& handled, bool& opens) {
  Slot& slot = slots_[handled.slot];
  // slot_chunk
  const std::int64_t chunk = compared(header.chunk);
  const std::int64_t before = slot.chunk;
  if (!from_parent && slot.chunk < chunk) slot.chunk = chunk;
  if (chunk < before) {
    handled.drop = Drop::stale;
    return;
  }
  const bool present = chunk == before;
  opens = !present && !from_parent;
  // slot_operation, slot_elements, slot_shape, slot_choices
  const CallDescriptor call = CallDescriptor::of(header);
  if (opens) slot.call = call;
  const bool differs = slot.call != call;
  // slot_workers
  const std::uint32_t member = from_parent ? 0 : std::uint32_t{1} << header.worker;
  const std::uint32_t had = opens ? 0 : slot.workers;
  if (!from_parent && !differs) slot.workers = had | member;
  // slot_complete
  const bool mismatch = (header.flags & protocol::kMismatch) != 0;
  if (opens) slot.has_result = false;
  const bool had_result = slot.has_result;
  if (from_parent && present && !mismatch && had == all() && !differs) slot.has_result = true;

  if (from_parent) {
    if (present && had_result) {
      handled.drop = Drop::duplicate;
    } else if (mismatch) {
      handled.outcome = Outcome::mismatch;
    } else if (!present || had != all()) {
      handled.drop = Drop::window;
    } else if (differs) {
      handled.drop = Drop::malformed;
    } else {
      handled.outcome = Outcome::completed;
    }
  } else if (differs) {
    handled.outcome = Outcome::mismatch;
  } else if (had == all()) {
    handled.outcome = config_.parent && !had_result ? Outcome::resend_sum : Outcome::resend_result;
  } else if ((had & member) != 0) {
    handled.drop = Drop::duplicate;
  } else if (slot.workers != all()) {
    handled.outcome = Outcome::stored;
  } else {
    handled.outcome = config_.parent ? Outcome::summed : Outcome::completed;
  }
}

TofinoJob::Handled TofinoJob::handle_packet(std::span<std::byte> packet, bool from_parent) {
  Handled handled;
  const auto view = protocol::PacketView::parse(packet);
  Header header = view->header();
  handled.drop = from_parent ? check_parent(header) : check(header, packet.size());
  if (handled.drop != Drop::none) return handled;
  handled.chunk = header.chunk;
  handled.worker = header.worker;
  if ((header.flags & protocol::kNack) != 0) {
    handled.outcome = Outcome::nack;
    return handled;
  }
  handled.slot = slot_of(header.chunk);
  bool opens = false;
  enter(header, from_parent, handled, opens);
  if (handled.drop != Drop::none) return handled;

  // sum_0 to sum_31
  const bool reads = handled.outcome == Outcome::resend_result || handled.outcome == Outcome::resend_sum;
  const std::uint32_t values = config_.payload_bytes / sizeof(std::uint32_t);
  for (std::uint32_t at = 0; at < values; ++at) {
    std::uint32_t& sum = sums_[handled.slot * values + at];
    std::uint32_t value;
    std::byte* in_packet = packet.data() + protocol::kHeaderBytes + at * sizeof value;
    std::memcpy(&value, in_packet, sizeof value);
    if (handled.outcome == Outcome::mismatch) {
      value = 0;
    } else {
      if (!reads) sum = opens || from_parent ? value : sum + value;
      value = sum;
    }
    std::memcpy(in_packet, &value, sizeof value);
  }

  Slot& slot = slots_[handled.slot];
  const bool has_name = from_parent || config_.names.empty();
  const std::uint16_t name = has_name ? header.worker : config_.names[header.worker];
  if (handled.outcome == Outcome::completed) {
    slot.number = ++results_;
    slot.last = name;
  }
  if (handled.outcome == Outcome::summed || handled.outcome == Outcome::resend_sum) {
    header.job = config_.parent->job;
    header.epoch = config_.parent->epoch;
    header.incarnation = config_.parent->incarnation;
    header.worker = config_.parent->worker;
    header.packet_number = 0;
  } else {
    const bool mismatch = handled.outcome == Outcome::mismatch;
    header.flags = mismatch ? protocol::kFromSwitch | protocol::kMismatch : protocol::kFromSwitch;
    header.job = config_.job;
    header.epoch = config_.epoch;
    header.incarnation = config_.incarnation;
    header.worker = mismatch ? name : slot.last;
    header.packet_number = mismatch ? 0 : slot.number;
  }
  protocol::write_header(header, packet.data());
  return handled;
}

std::vector<std::uint16_t> TofinoJob::missing(std::uint64_t chunk) const {
  std::vector<std::uint16_t> workers;
  const Slot& slot = slots_[slot_of(chunk)];
  const bool next = compared(chunk) > slot.chunk;
  for (std::uint16_t worker = 0; worker < config_.workers && compared(chunk) >= slot.chunk; ++worker) {
    if (next || (slot.workers >> worker & 1) == 0) workers.push_back(worker);
  }
  return workers;
}

void TofinoJob::append_canonical(std::vector<std::byte>& out) const {
  protocol::append_values(out, config_.job, config_.epoch, config_.incarnation, config_.workers, config_.window,
                          config_.payload_bytes, chunk_bits_, config_.parent.has_value());
  if (const auto& parent = config_.parent) {
    protocol::append_values(out, parent->job, parent->epoch, parent->incarnation, parent->worker);
  }
  protocol::append_bytes(out, config_.names.data(), config_.names.size() * sizeof(std::uint16_t));
  for (const Slot& slot : slots_) {
    protocol::append_values(out, slot.chunk, slot.has_result, slot.workers, slot.call.operation, slot.call.elements,
                            slot.call.count, slot.call.wire, slot.call.reduce, slot.call.table, slot.number, slot.last);
  }
  protocol::append_bytes(out, sums_.data(), sums_.size() * sizeof(std::uint32_t));
  protocol::append_values(out, results_);
}

}  // namespace netfold::model_check
