#include "job_port.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "packet_protection.hpp"

namespace netfold::dataplane {

using protocol::CallDescriptor;
using protocol::Drop;
using protocol::SwitchJob;
using transport::Datagrams;

namespace {

// Least time between two mismatch packets to all workers.
constexpr std::int64_t kMismatchNs = 10'000'000;

void count(std::uint64_t (&drops)[protocol::kDropCount], Drop reason) { ++drops[static_cast<std::size_t>(reason)]; }

}  // namespace

JobSession::JobSession(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
                       const std::optional<ParentKeys>& parent_keys, auth::Security security)
    : machine(config),
      egress(machine, keys ? std::optional(keys->results) : std::nullopt, security),
      workers(config.workers),
      first_arrivals(machine.slot_count()) {
  for (std::size_t i = 0; keys && i < workers.size(); ++i) {
    workers[i].authenticator.emplace(keys->contributions.at(i), security);
  }
  if (config.parent) parent.emplace(machine, parent_keys, security);
  if (security == auth::Security::encrypt) plain.resize(machine.packet_bytes());
}

JobPort::JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
                 const std::vector<auth::Key>& hello_keys)
    : id_(id), incarnation_(incarnation), workers_(nonces.size()), peers_(nonces.size(), Datagrams::kUnknownPeer) {
  if (!hello_keys.empty() && hello_keys.size() != nonces.size()) {
    throw std::invalid_argument("open: a job with keys has one hello key per worker");
  }
  for (std::size_t i = 0; i < nonces.size(); ++i) {
    workers_[i].nonce = nonces[i];
    if (!hello_keys.empty()) workers_[i].hello_authenticator.emplace(hello_keys[i]);
  }
  counters_.last_arrivals.resize(nonces.size());
  counters_.arrivals.resize(nonces.size());
  counters_.arrival_lag_ns.resize(nonces.size());
}

JobPort::JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
                 const std::vector<auth::Key>& hello_keys, std::unique_ptr<transport::UdpSocket> socket)
    : JobPort(id, incarnation, nonces, hello_keys) {
  socket_ = socket.get();
  port_ = std::move(socket);
}

JobPort::JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
                 const std::vector<auth::Key>& hello_keys, std::unique_ptr<transport::fabric::FabricDatagrams> endpoint,
                 const std::vector<std::uint64_t>& proofs)
    : JobPort(id, incarnation, nonces, hello_keys) {
  for (std::size_t i = 0; i < nonces.size(); ++i) {
    if (proofs.at(i) == nonces[i]) throw std::invalid_argument("open: a worker's proof differs from its nonce");
  }
  proofs_ = proofs;
  endpoint_ = endpoint.get();
  port_ = std::move(endpoint);
}

void JobPort::set_worker_address(std::uint16_t worker, const transport::Address& address,
                                 const std::optional<transport::Address>& source) {
  if (socket_ == nullptr) throw std::invalid_argument("set_worker_address: the job is on a fabric");
  workers_.at(worker).expected = socket_->add(address, source);
}

void JobPort::set_worker_fabric_address(std::uint16_t worker, const std::vector<std::byte>& name, std::uint64_t tag) {
  if (endpoint_ == nullptr) throw std::invalid_argument("set_worker_fabric_address: the job is on no fabric");
  Worker& named = workers_.at(worker);
  endpoint_->connect(worker, name, tag);
  named.expected = worker;
}

void JobPort::begin(std::unique_ptr<JobSession> session, bool has_keys) {
  // A second session would drop the results that workers may still ask for.
  if (session_) throw std::invalid_argument("begin: the job has begun; another epoch needs a new job");
  const bool was_opened_with_keys = !workers_.empty() && workers_[0].hello_authenticator.has_value();
  if (was_opened_with_keys != has_keys) throw std::invalid_argument("begin: keys are for a job that has them");
  if (session->workers.size() != workers_.size()) {
    throw std::invalid_argument("begin: not as many workers as were opened");
  }
  std::string silent;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (!workers_[i].address) silent += " " + std::to_string(i);
  }
  if (!silent.empty()) throw std::invalid_argument("begin: no hello came from worker" + silent);
  if (session->parent.has_value() != parent_.has_value()) {
    throw std::invalid_argument("begin: a job has a parent in its config and a port to it, or neither");
  }
  if (parent_) parent_->begin(std::move(*session->parent));
  session_ = std::move(session);
}

JobCounters JobPort::counters() const {
  JobCounters counters = counters_;
  const auto& of_port = port_->counters();
  counters.receive_calls = of_port.receive_calls;
  counters.received_datagrams = of_port.received_datagrams;
  counters.send_errors += of_port.send_errors;
  if (!of_port.last_send_error.empty()) counters.last_send_error = of_port.last_send_error;
  if (session_) {
    counters.slots = session_->machine.slot_count();
    counters.slots_collecting = session_->machine.collecting_count();
    counters.slots_summed = parent_ ? session_->machine.summed_count() : 0;
  }
  if (const auto* sender = parent_ ? parent_->sender() : nullptr) {
    counters.sums_sent = sender->packets_sent();
    counters.sums_resent = sender->sent_again();
  }
  return counters;
}

std::vector<std::uint16_t> JobPort::missing(std::uint64_t chunk) const {
  return session_ ? session_->machine.missing(chunk) : std::vector<std::uint16_t>();
}

void JobPort::fail(const std::string& error) {
  ++counters_.send_errors;
  counters_.last_send_error = error;
  if (session_) session_->egress.clear();
}

void JobPort::receive() {
  port_->receive([&](std::span<const Datagrams::PacketTrain> batch) {
    const std::int64_t now_ns = transport::now_ns();
    // Sorted by worker, each worker's packets in order of arrival: floats that come in rank order are added at once
    // (switch_job.hpp). Packets of one batch count as simultaneous anyway.
    order_.resize(batch.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](std::uint16_t one, std::uint16_t other) {
      return protocol::worker_of(batch[one].bytes) < protocol::worker_of(batch[other].bytes);
    });
    for (const std::uint16_t index : order_) {
      transport::for_each_packet(
          batch[index], [&](std::span<const std::byte> bytes) { handle_packet(bytes, batch[index].source, now_ns); });
    }
  });
}

void JobPort::handle_packet(std::span<const std::byte> bytes, Peer source, std::int64_t now_ns) {
  const auto count_drop = [&](Drop reason) { count(counters_.drops, reason); };
  const auto view = protocol::PacketView::parse(bytes);
  if (!view) return count_drop(Drop::malformed);
  const protocol::Header header = view->header();
  if (header.flags & protocol::kHello) return handle_hello(header, bytes, source);
  if (header.worker >= workers_.size()) return count_drop(Drop::worker);
  if (!workers_[header.worker].is_validated(source)) return count_drop(Drop::source);
  if (!session_) return count_drop(Drop::epoch);
  JobSession::Worker& worker = session_->workers[header.worker];
  if (worker.authenticator) {  // the header is never encrypted, and the MAC covers it
    bytes = open_packet(*worker.authenticator, bytes, session_->plain);
    if (bytes.empty()) return count_drop(Drop::unauthenticated);
  }

  const Handled handled = session_->machine.handle_packet(header, bytes);
  // A duplicate or stale packet of this epoch shows as well that earlier packet numbers should have come.
  if (handled.outcome != SwitchJob::Outcome::dropped || handled.drop == Drop::stale ||
      handled.drop == Drop::duplicate) {
    const auto gap = worker.gap_detector.observe(header.packet_number);
    if (gap.count > 0) send_nack(header.worker, gap);
  }
  switch (handled.outcome) {
    case SwitchJob::Outcome::dropped:
      return count_drop(handled.drop);
    case SwitchJob::Outcome::stored:
      return count_arrival(handled, now_ns, false);
    case SwitchJob::Outcome::completed:
      count_arrival(handled, now_ns, true);
      return complete(handled.slot);
    case SwitchJob::Outcome::summed:
      count_arrival(handled, now_ns, true);
      return parent_->session().sender.offer(handled.slot);
    case SwitchJob::Outcome::resend_sum:
      count_drop(Drop::duplicate);  // as far as this switch's own sum is concerned
      return parent_->session().sender.offer(handled.slot);
    case SwitchJob::Outcome::nack:
      return;  // only a parent sends NACKs
    case SwitchJob::Outcome::resend_result:
      ++counters_.results_resent;
      if (!session_->egress.add_resend(handled.worker, handled.slot)) ++counters_.backlog_dropped;
      return;
    case SwitchJob::Outcome::mismatch:
      return send_mismatch(handled, CallDescriptor::of(header), now_ns);
  }
}

void JobPort::complete(std::uint32_t slot) {
  session_->egress.add_result(slot);
  ++counters_.results;
  counters_.result_bytes += session_->machine.descriptor(slot).value_bytes();
}

void JobPort::receive_from_parent() {
  parent_->port().receive([&](std::span<const Datagrams::PacketTrain> batch) {
    for (const auto& train : batch) {
      transport::for_each_packet(train,
                                 [&](std::span<const std::byte> bytes) { handle_parent_packet(bytes, train.source); });
    }
  });
}

void JobPort::handle_parent_packet(std::span<const std::byte> bytes, Peer source) {
  const auto count_drop = [&](Drop reason) { count(counters_.parent_drops, reason); };
  if (!parent_->is_parent(source)) return count_drop(Drop::source);
  if (!session_) return count_drop(Drop::epoch);
  ParentPort::Session& parent = parent_->session();
  if (parent.result_authenticator) {
    bytes = open_packet(*parent.result_authenticator, bytes, session_->plain);
    if (bytes.empty()) return count_drop(Drop::unauthenticated);
  }
  const auto view = protocol::PacketView::parse(bytes);
  if (!view) return count_drop(Drop::malformed);
  const protocol::Header header = view->header();
  const Handled handled = session_->machine.handle_parent(header, bytes);
  if (handled.outcome == SwitchJob::Outcome::dropped) return count_drop(handled.drop);
  if (handled.outcome == SwitchJob::Outcome::completed) {
    parent.sender.handle_result(handled.slot, header.packet_number);
    complete(handled.slot);
  } else if (handled.outcome == SwitchJob::Outcome::nack) {
    ++counters_.parent_nacks;
    if (parent.sender.handle_nack(header.chunk, header.elements) == 0) count_drop(Drop::stale);
  } else {  // a mismatch: the differing worker has the same name at every switch of the tree
    ++counters_.mismatches;
    send_to_all_but(workers_.size(), mismatch_packet(handled.chunk, CallDescriptor::of(header), header.worker));
  }
}

void JobPort::count_arrival(const Handled& handled, std::int64_t now_ns, bool is_last) {
  ++counters_.contributions;
  JobSession::FirstArrival& first = session_->first_arrivals[handled.slot];
  if (first.chunk != handled.chunk) first = {handled.chunk, now_ns};
  ++counters_.arrivals[handled.worker];
  counters_.arrival_lag_ns[handled.worker] += static_cast<std::uint64_t>(now_ns - first.ns);
  if (is_last && now_ns > first.ns) ++counters_.last_arrivals[handled.worker];
}

void JobPort::handle_hello(const protocol::Header& header, std::span<const std::byte> bytes, Peer source) {
  if (header.worker >= workers_.size()) return count(counters_.drops, Drop::worker);
  Worker& worker = workers_[header.worker];
  const auto is_authentic = [&] {
    return !worker.hello_authenticator || verify_packet(*worker.hello_authenticator, bytes);
  };
  const Drop drop = worker.handle_hello(header, id_, incarnation_, source, is_authentic);
  if (drop != Drop::none) return count(counters_.drops, drop);
  peers_[header.worker] = source;
  ++counters_.hellos;
  if (endpoint_ == nullptr) return send(header.worker, bytes);
  std::vector<std::byte> answer(bytes.begin(), bytes.end());
  protocol::Header with_proof = header;
  with_proof.packet_number = proofs_[header.worker];
  protocol::write_header(with_proof, answer.data());
  if (worker.hello_authenticator) {
    const std::span<const std::byte> packet(answer.data(), answer.size() - auth::kMacBytes);
    authenticate_packet(*worker.hello_authenticator, packet, answer.data() + packet.size());
  }
  send(header.worker, answer);
}

bool JobPort::flush() {
  if (!session_) return false;
  const bool blocked = session_->egress.flush(*port_, peers_, counters_);
  return std::exchange(blocked_, blocked) != blocked;
}

void JobPort::send_nack(std::uint16_t to, const protocol::GapDetector::Gap& gap) {
  ++counters_.nacks;
  std::vector<std::byte> packet(session_->machine.packet_bytes());
  session_->machine.write_nack(to, gap, ++session_->control_packets, packet.data());
  session_->egress.protect(packet);
  send(to, packet);  // a hint: where the port does not take the packet, the worker's timer repairs the loss
}

void JobPort::send_mismatch(const Handled& handled, const CallDescriptor& call, std::int64_t now_ns) {
  ++counters_.mismatches;
  const SwitchJob& machine = session_->machine;
  // Each copy of a packet that disagrees gets one answer. The other workers are told every kMismatchNs at most: one
  // worker must not make the switch send a packet to all of them for every packet of its own.
  if (now_ns >= session_->next_broadcast_ns) {
    session_->next_broadcast_ns = now_ns + kMismatchNs;
    send_to_all_but(handled.worker, mismatch_packet(handled.chunk, call, machine.name_of(handled.worker)));
  }
  send(handled.worker,
       mismatch_packet(handled.chunk, machine.descriptor(handled.slot), machine.name_of(handled.other)));
}

std::vector<std::byte> JobPort::mismatch_packet(std::uint64_t chunk, const CallDescriptor& call, std::uint16_t about) {
  std::vector<std::byte> packet(session_->machine.packet_bytes());
  session_->machine.write_mismatch(chunk, call, about, ++session_->control_packets, packet.data());
  session_->egress.protect(packet);
  return packet;
}

void JobPort::send(std::uint16_t to, std::span<const std::byte> packet) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size()};
  Datagrams::Run run{.to = peers_[to], .pieces = {&piece, 1}, .packet_bytes = packet.size()};
  port_->send({&run, 1});
}

void JobPort::send_to_all_but(std::size_t except, std::span<const std::byte> packet) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size()};
  std::vector<Datagrams::Run> runs;
  for (std::size_t to = 0; to < workers_.size(); ++to) {
    if (to == except) continue;
    runs.push_back({.to = peers_[to], .pieces = {&piece, 1}, .packet_bytes = packet.size()});
  }
  port_->send(runs);
}

}  // namespace netfold::dataplane
