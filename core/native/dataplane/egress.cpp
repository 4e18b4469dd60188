#include "egress.hpp"

#include <algorithm>

#include "packet_protection.hpp"

namespace netfold::dataplane {

using transport::Datagrams;
using transport::UdpSocket;

Egress::Egress(const protocol::SwitchJob& machine, const std::optional<auth::Key>& key, auth::Security security)
    : machine_(machine),
      ring_(machine.slot_count()),
      queues_(machine.config().workers),
      packet_bytes_(machine.packet_bytes() + (key ? auth::kMacBytes : 0)),
      per_run_(UdpSocket::packets_per_message(packet_bytes_)),
      per_packet_(key ? 2 : 1),
      pieces_(UdpSocket::kMessagesPerCall * per_run_ * per_packet_) {
  if (!key) return;
  authenticator_.emplace(*key, security);
  macs_.resize(machine.slot_count() * auth::kMacBytes);
  if (authenticator_->encrypts()) encrypted_.resize(machine.slot_count() * machine.packet_bytes());
}

void Egress::add_result(std::uint32_t slot) {
  if (authenticator_) {
    std::byte* const encrypted = encrypted_.empty() ? nullptr : encrypted_.data() + slot * machine_.packet_bytes();
    protect_packet(*authenticator_, machine_.frame(slot), encrypted, macs_.data() + slot * auth::kMacBytes);
  }
  ring_[result_count_++ & (ring_.size() - 1)] = slot;
}

bool Egress::add_resend(std::uint16_t worker, std::uint32_t slot) {
  auto& resends = queues_[worker].resends;
  if (resends.size() >= ring_.size()) return false;
  resends.push_back(slot);
  return true;
}

void Egress::protect(std::vector<std::byte>& packet) {
  if (!authenticator_) return;
  const std::size_t bytes = packet.size();
  packet.resize(bytes + auth::kMacBytes);
  protect_packet(*authenticator_, {packet.data(), bytes}, packet.data(), packet.data() + bytes);
}

void Egress::clear() {
  for (Queue& queue : queues_) {
    queue.resends.clear();
    queue.sent = result_count_;
  }
}

bool Egress::flush(Datagrams& port, std::span<const Peer> peers, JobCounters& counters) {
  skip_overwritten(counters);
  for (bool more = true; more;) {
    more = false;
    // One run per worker in turn, so that no worker waits for another worker's whole backlog.
    for (std::size_t next_worker = 0; next_worker < queues_.size();) {
      Batch batch;
      fill(batch, next_worker, peers);
      if (batch.count == 0) break;
      const std::size_t sent = port.send({batch.runs.data(), batch.count});
      counters.results_sent += sent;
      for (std::size_t i = 0; i < batch.count; ++i) {
        Queue& queue = *batch.queues[i];
        const std::size_t taken = batch.runs[i].taken;
        if (queue.resends.empty()) {
          queue.sent += taken;
        } else {
          queue.resends.erase(queue.resends.begin(), queue.resends.begin() + static_cast<std::ptrdiff_t>(taken));
        }
        more |= !queue.is_empty(result_count_);
      }
      if (sent < batch.packets) return true;
    }
  }
  return false;
}

void Egress::skip_overwritten(JobCounters& counters) {
  for (Queue& queue : queues_) {
    const std::uint64_t waiting = result_count_ - queue.sent;
    if (waiting <= ring_.size()) continue;
    counters.backlog_dropped += waiting - ring_.size();
    queue.sent = result_count_ - ring_.size();
  }
}

void Egress::fill(Batch& batch, std::size_t& next_worker, std::span<const Peer> peers) {
  const Queue* previous = nullptr;  // the last run's queue, where that run has results and no resends
  for (; next_worker < queues_.size() && batch.count < batch.runs.size(); ++next_worker) {
    Queue& queue = queues_[next_worker];
    if (queue.is_empty(result_count_)) continue;
    const bool resends = !queue.resends.empty();
    const std::uint64_t waiting = resends ? queue.resends.size() : result_count_ - queue.sent;
    const std::size_t take = std::min<std::size_t>(waiting, per_run_);
    std::span<const iovec> pieces;
    if (previous != nullptr && !resends && previous->sent == queue.sent) {
      pieces = batch.runs[batch.count - 1].pieces;  // the same results, as most workers have
    } else {
      iovec* first = pieces_.data() + batch.count * per_run_ * per_packet_;
      for (std::size_t i = 0; i < take; ++i) {
        add_pieces(resends ? queue.resends[i] : ring_[(queue.sent + i) & (ring_.size() - 1)], first + i * per_packet_);
      }
      pieces = {first, take * per_packet_};
    }
    batch.runs[batch.count] = {
        .to = peers[next_worker], .pieces = pieces, .pieces_per_packet = per_packet_, .packet_bytes = packet_bytes_};
    batch.queues[batch.count++] = &queue;
    batch.packets += take;
    previous = resends ? nullptr : &queue;
  }
}

void Egress::add_pieces(std::uint32_t slot, iovec* out) {
  const auto frame = machine_.frame(slot);
  const std::byte* from = encrypted_.empty() ? frame.data() : encrypted_.data() + slot * frame.size();
  out[0] = {const_cast<std::byte*>(from), frame.size()};
  if (authenticator_) out[1] = {macs_.data() + slot * auth::kMacBytes, auth::kMacBytes};
}

}  // namespace netfold::dataplane
