// A group's membership of a job on a switch: one port, one protocol machine, and several operations at once that stream
// through one window.
//
// The socket call gathers the values from the tensor, and results are written in place. A chunk's contribution is not
// needed again once its result has arrived, since the result proves that the switch counted the contribution.
//
// After a loss of the switch. A channel keeps the packets of the results of its last W chunks, for ranks that lack
// them. W are enough. Let b be the lowest chunk that some rank r lacks. A chunk has a result only when r has
// contributed to it, and r contributes to a chunk only when it has all results W and more before it. So no rank has a
// result of chunk b + W or above, and no rank lacks a chunk below b. This holds for the sequence of chunks, not for
// operations: a completed operation, whose buffer may hold other data by now, has its chunks in the sequence like any
// other. It holds while nothing is received: every rank freezes its channel before any rank reports its results.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/collective/algorithm.hpp>
#include <netfold/collective/contribution_map.hpp>
#include <netfold/protocol/worker.hpp>
#include <netfold/transport/datagrams.hpp>

#include <array>
#include <memory>
#include <optional>

namespace netfold::collective {

// The keys of a worker's packets in one epoch.
struct ChannelKeys {
  auth::Key contributions{};  // this worker's own
  auth::Key results{};        // all workers'
  auth::Security security = auth::Security::authenticate;
};

// A range of an operation's elements (ContributionMap::elements).
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

class Channel {
 public:
  // generation: not 0, and different for each membership.
  // config: the worker's number in it is the one at its own switch, which in a tree differs from the one in the job.
  // keys: none in a job whose packets carry no MACs.
  // ranks: the group's rank of each of the job's workers, by its number in the whole job. rank: this rank.
  // Throws std::runtime_error where no MAC can be computed.
  Channel(std::uint64_t generation, const protocol::WorkerConfig& config, const std::optional<ChannelKeys>& keys,
          std::vector<int> ranks, int rank, std::unique_ptr<transport::Datagrams> port, transport::Datagrams::Peer to);

  static constexpr std::size_t kMaxOperations = protocol::Worker::kMaxOperations;

  bool can_start() const;
  // Starts an operation and returns its token. Operations start in the same order on every rank. Borrows both until
  // release(token). Preconditions: can_start(), and the map has elements.
  int start(const Call& call, const ContributionMap& map);
  struct Active {
    const Call* call = nullptr;
    const ContributionMap* map = nullptr;
    bool finished = false;
    std::uint64_t first_chunk = 0;   // where the operation begins in the sequence of chunks
    std::uint64_t result_bytes = 0;  // of packets whose results have arrived, each counted once
    Algorithm::Counts counts;        // slowest_rank: whose contribution came last, of the newest result
  };
  const Active& active(int token) const { return active_[static_cast<std::size_t>(token)]; }
  void release(int token) { active_[static_cast<std::size_t>(token)] = Active{}; }

  // Receives, decodes and sends for all operations. A second call at the same time does nothing.
  Progress poll(std::int64_t now_ns);
  void wait_for(WaitSet& set) const;
  const Failure& failure() const { return failure_; }

  // The name of this membership, the same on all ranks. In a tree each switch has another name for its part of the job.
  std::uint64_t generation() const { return generation_; }
  // Gives up the switch: nothing more is sent or received.
  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  // The results that this rank has.
  struct ReceiveState {
    std::uint64_t base = 0;       // it has all chunks below
    std::uint64_t end = 0;        // it has begun operations up to this chunk
    std::vector<std::byte> held;  // bit i: it has chunk base + i; the lowest bit of a byte first
  };
  ReceiveState receive_state() const;
  // The packet of a chunk's result, with header; empty where it is not kept.
  std::span<const std::byte> kept(std::uint64_t chunk) const;
  // Accepts a result that another rank kept, by the same checks as a packet from the switch, except for the job's name
  // at that rank's switch. False where a check failed.
  bool accept_kept(std::span<const std::byte> packet, std::int64_t now_ns);
  // An operation's elements without a result, in ascending order.
  std::vector<Range> missing(int token) const;

  const protocol::Worker& machine() const { return machine_; }
  void share_path(bool with_own) { machine_.share_path(with_own); }
  const std::vector<int>& ranks() const { return ranks_; }
  // Why nothing reaches the switch, where the port knows; else empty.
  const std::string& path_error() const { return port_->path_error(); }
  const std::string& send_error() const { return port_->counters().last_send_error; }
  std::uint64_t drops(protocol::Drop reason) const { return drops_[static_cast<std::size_t>(reason)]; }

 private:
  static constexpr std::size_t kBatchPackets = 256;

  bool receive(std::int64_t now_ns);
  bool send(std::int64_t now_ns);
  void take(std::span<const std::byte> bytes, std::int64_t now_ns);
  // The packet without its MAC, decrypted; empty where the MAC is wrong.
  std::span<const std::byte> opened(std::span<const std::byte> bytes);
  Active* find(std::uint32_t operation);
  void stage(const protocol::Worker::Send& send, const ContributionMap& map, iovec* parts);
  // The failure of a packet from another call than this rank's at the same chunk.
  Failure mismatch(const protocol::Header& theirs) const;

  bool accept(std::span<const std::byte> packet, std::int64_t now_ns);
  std::byte* kept_at(std::uint64_t chunk) const;

  int rank_of(std::uint16_t worker) const { return worker < ranks_.size() ? ranks_[worker] : -1; }

  std::uint64_t generation_;
  protocol::Worker machine_;
  std::optional<auth::PacketAuthenticator> authenticator_;         // of contributions
  std::optional<auth::PacketAuthenticator> result_authenticator_;  // of results
  std::size_t mac_bytes_;                                          // of a packet: 0 without keys
  std::vector<int> ranks_;
  int rank_;
  std::unique_ptr<transport::Datagrams> port_;
  transport::Datagrams::Peer to_;
  Failure failure_;
  std::uint16_t table_ = 0;  // hash of the group's choice table
  std::array<Active, kMaxOperations> active_;
  std::array<std::uint64_t, protocol::kDropCount> drops_{};
  std::int64_t polled_ns_ = -1;
  Progress polled_ = Progress::idle;
  bool blocked_ = false;  // the port takes no more packets
  bool frozen_ = false;

  std::vector<std::byte> headers_;     // of a batch
  std::vector<std::byte> staging_;     // values of a batch that are assembled or converted
  std::vector<std::byte> zeros_;       // padding, and contributions of nothing
  std::vector<std::byte> macs_;        // of a batch
  std::vector<std::byte> encrypted_;   // values and padding of a batch, where packets are encrypted
  std::vector<std::byte> plain_;       // a received packet, decrypted
  std::unique_ptr<std::byte[]> kept_;  // packets of the newest results, without MACs; chunk c at c mod W
  std::vector<iovec> parts_;
  std::vector<std::uint64_t> chunks_;
  std::vector<Active*> owners_;
  std::vector<bool> again_;
};

}  // namespace netfold::collective
