// The packets of one job to its workers: every result to all of them, and results once more to workers that ask again.
//
// Results stand in a ring of as many slots as the job has; a worker's queue is a position in the ring, so a result
// costs one entry for all workers. A slot may have a new tenant by the time that it is sent: its frame is then still a
// whole, final result, with its own chunk number in the header, and at worst not needed. A worker whose queue is full
// loses its oldest results, and asks for them again.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/dataplane/job_counters.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <array>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace netfold::dataplane {

class Egress {
 public:
  using Peer = transport::Datagrams::Peer;

  // `machine` outlives this object. `key`: of results, where packets carry a MAC. Allocates all memory but resends.
  Egress(const protocol::SwitchJob& machine, const std::optional<auth::Key>& key, auth::Security security);

  // Queues the slot's complete frame for every worker, authenticated once.
  void add_result(std::uint32_t slot);
  // Queues the slot's frame for one worker; false where that worker has slot_count() such frames queued already.
  bool add_resend(std::uint16_t worker, std::uint32_t slot);
  // Appends the MAC to a control packet, where packets carry one, and encrypts the packet in place.
  void protect(std::vector<std::byte>& packet);
  // Sends what is queued. `peers`: by worker. Returns true where the port did not take all: call again when it has
  // room.
  bool flush(transport::Datagrams& port, std::span<const Peer> peers, JobCounters& counters);
  // Drops all that is queued.
  void clear();

 private:
  struct Queue {                        // of a worker
    std::uint64_t sent = 0;             // of the job's results
    std::deque<std::uint32_t> resends;  // slots, sent before results; at most slot_count()
    bool is_empty(std::uint64_t result_count) const { return resends.empty() && sent >= result_count; }
  };
  struct Batch {  // one run each for some workers
    std::array<transport::Datagrams::Run, transport::UdpSocket::kMessagesPerCall> runs;
    std::array<Queue*, transport::UdpSocket::kMessagesPerCall> queues;
    std::size_t count = 0;
    std::size_t packets = 0;
  };
  void fill(Batch& batch, std::size_t& next_worker, std::span<const Peer> peers);
  void skip_overwritten(JobCounters& counters);
  void add_pieces(std::uint32_t slot, iovec* out);

  const protocol::SwitchJob& machine_;
  std::optional<auth::PacketAuthenticator> authenticator_;
  std::vector<std::byte> macs_;       // of the slots' frames
  std::vector<std::byte> encrypted_;  // the slots' frames, where packets are encrypted
  std::vector<std::uint32_t> ring_;   // the slots of the last slot_count() results
  std::uint64_t result_count_ = 0;
  std::vector<Queue> queues_;  // by worker
  std::size_t packet_bytes_;   // with the MAC
  std::size_t per_run_;        // packets
  std::size_t per_packet_;     // pieces: the frame, and its MAC
  std::vector<iovec> pieces_;  // of a batch
};

}  // namespace netfold::dataplane
