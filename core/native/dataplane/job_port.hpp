// One job's port: packets of its workers and of its parent come in, SwitchJob says what they mean, and answers go out.
//
// Used by the data plane's thread only, but for the constructors.
#pragma once

#include <netfold/dataplane/data_plane.hpp>
#include <netfold/protocol/address_validation.hpp>
#include <netfold/protocol/gap_detector.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/transport/fabric/fabric_datagrams.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "egress.hpp"
#include "parent_port.hpp"

namespace netfold::dataplane {

// The state of a job in its epoch. Allocates all memory; made by the commanding thread, not between two batches.
struct JobSession {
  JobSession(const protocol::JobConfig& config, const std::optional<JobKeys>& keys,
             const std::optional<ParentKeys>& parent_keys, auth::Security security);

  struct Worker {
    std::optional<auth::PacketAuthenticator> authenticator;  // of contributions
    protocol::GapDetector gap_detector;
  };
  struct FirstArrival {  // of the first contribution to the slot's present chunk
    std::uint64_t chunk = ~std::uint64_t{0};
    std::int64_t ns = 0;
  };

  protocol::SwitchJob machine;
  Egress egress;
  std::vector<Worker> workers;
  std::vector<FirstArrival> first_arrivals;  // by slot
  std::optional<ParentPort::Session> parent;
  std::vector<std::byte> plain;        // the present packet, decrypted
  std::uint64_t control_packets = 0;   // mismatches and NACKs written
  std::int64_t next_broadcast_ns = 0;  // all workers may be told of a mismatch from here on
};

class JobPort {
 public:
  using Peer = transport::Datagrams::Peer;

  // Nonces and hello keys: by worker; keys are empty for a job whose packets carry no MAC.
  // Throws std::invalid_argument; std::runtime_error where this host cannot check a MAC.
  JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
          const std::vector<auth::Key>& hello_keys, std::unique_ptr<transport::UdpSocket> socket);
  JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
          const std::vector<auth::Key>& hello_keys, std::unique_ptr<transport::fabric::FabricDatagrams> endpoint,
          const std::vector<std::uint64_t>& proofs);

  // Commands; see DataPlane. They throw std::invalid_argument for a job on the other kind of port.
  void set_worker_address(std::uint16_t worker, const transport::Address& address,
                          const std::optional<transport::Address>& source);
  void set_worker_fabric_address(std::uint16_t worker, const std::vector<std::byte>& name, std::uint64_t tag);
  void connect_parent(std::unique_ptr<transport::Datagrams> port, Peer to) { parent_.emplace(std::move(port), to); }
  void begin(std::unique_ptr<JobSession> session, bool has_keys);
  JobCounters counters() const;
  std::vector<std::uint16_t> missing(std::uint64_t chunk) const;

  transport::Datagrams& port() { return *port_; }
  std::optional<ParentPort>& parent() { return parent_; }
  transport::Datagrams::WaitHint wait_hint() { return port_->wait_hint(blocked_); }

  // Handle at most one batch of packets of workers, or of the parent. Throw std::system_error where a provider fails.
  void receive();
  void receive_from_parent();
  // Send results, or sums, as far as the port takes them; return true where the port's wait hint has changed.
  bool flush();
  bool flush_sums() { return session_ && parent_ && parent_->flush(session_->machine); }
  // After a provider failed: drop all queued results. The workers see that no result comes, and go on without the
  // switch.
  void fail(const std::string& error);

 private:
  struct Worker : protocol::AddressValidation<Peer> {
    std::optional<auth::PacketAuthenticator> hello_authenticator;
  };
  using Handled = protocol::SwitchJob::Handled;

  JobPort(std::uint32_t id, std::uint32_t incarnation, const std::vector<std::uint64_t>& nonces,
          const std::vector<auth::Key>& hello_keys);
  void handle_packet(std::span<const std::byte> bytes, Peer source, std::int64_t now_ns);
  void handle_hello(const protocol::Header& header, std::span<const std::byte> bytes, Peer source);
  void handle_parent_packet(std::span<const std::byte> bytes, Peer source);
  void count_arrival(const Handled& handled, std::int64_t now_ns, bool is_last);
  void complete(std::uint32_t slot);
  void send_nack(std::uint16_t to, const protocol::GapDetector::Gap& gap);
  void send_mismatch(const Handled& handled, const protocol::CallDescriptor& call, std::int64_t now_ns);
  std::vector<std::byte> mismatch_packet(std::uint64_t chunk, const protocol::CallDescriptor& call,
                                         std::uint16_t about);
  void send(std::uint16_t to, std::span<const std::byte> packet);
  // `except`: a worker, or workers_.size() for none.
  void send_to_all_but(std::size_t except, std::span<const std::byte> packet);

  std::uint32_t id_;
  std::uint32_t incarnation_;
  std::unique_ptr<transport::Datagrams> port_;
  transport::UdpSocket* socket_ = nullptr;                  // port_, over UDP
  transport::fabric::FabricDatagrams* endpoint_ = nullptr;  // port_, on a fabric
  std::vector<std::uint64_t> proofs_;                       // by worker, on a fabric
  std::vector<Worker> workers_;
  std::vector<Peer> peers_;  // by worker: the verified address
  std::optional<ParentPort> parent_;
  std::unique_ptr<JobSession> session_;  // from `begin` on
  JobCounters counters_;
  bool blocked_ = false;              // the port did not take all results
  std::vector<std::uint16_t> order_;  // of a batch's trains
};

}  // namespace netfold::dataplane
