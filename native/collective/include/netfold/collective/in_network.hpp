// Collectives inside the network: this rank's end of the aggregation protocol.
//
// One step. Bytes sent by a rank for n bytes of tensor: n and a header a packet, whatever the number of ranks
// (an all_reduce's ring sends 2n(P-1)/P); what each operation is to the switch: contribution_map.hpp. The values are gathered
// from the tensor by the socket call and results are written in place; a chunk's contribution is never needed again
// once its result is here, since the result proves that it was counted.
//
// A Channel is a group's membership of a job on a switch: one port, one protocol machine, several
// operations at once that stream through one window. An InNetwork is one operation in it.
//
// What a lost switch leaves behind. A channel keeps the results of its last W chunks as they came, to give them to
// ranks that have not got them. W are enough. Let b be the lowest chunk that some rank r lacks: a chunk has a result
// only when r has contributed to it, and r contributes to a chunk only when it has all results W and more before it. So
// no rank has a result of chunk b + W or above, and what anybody lacks is not below b. This is about the line of chunks
// and not about operations: one whose sums were given back, and whose buffer holds something else by now, lies on the
// line like any other. It holds while nothing is received: every rank freezes its channel before any rank says what it
// has.
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

// A part of an operation's elements on the line.
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

class Channel {
 public:
  // `ranks`: what the job's workers, by number in the whole job, are called in this group; `rank`: this one. In a tree
  // of switches the number that a worker has at its own (in `config`) is another. `keys`: none in a job whose packets
  // carry no tags; std::runtime_error where no tag can be made. `generation`: not 0, and another one for each membership.
  Channel(std::uint64_t generation, const protocol::WorkerConfig& config, const std::optional<ChannelKeys>& keys,
          std::vector<int> ranks, int rank, std::unique_ptr<transport::Datagrams> port, transport::Datagrams::Peer to);

  static constexpr std::size_t kMaxOperations = protocol::Worker::kMaxOperations;

  bool can_start() const;
  // Operations start in the same order on every rank. Both are borrowed until release(token). Precondition: there are
  // elements on the line.
  int start(const Call& call, const ContributionMap& map);
  bool finished(int token) const { return active_[static_cast<std::size_t>(token)].finished; }
  std::uint64_t wire_bytes(int token) const { return active_[static_cast<std::size_t>(token)].wire_bytes; }
  std::uint64_t result_bytes(int token) const { return active_[static_cast<std::size_t>(token)].result_bytes; }
  std::uint32_t retransmissions(int token) const { return active_[static_cast<std::size_t>(token)].retransmissions; }
  // The rank whose contribution came last, of the newest result.
  int last_rank(int token) const { return active_[static_cast<std::size_t>(token)].last_rank; }
  void release(int token) { active_[static_cast<std::size_t>(token)] = Active{}; }

  // Receives, decodes, sends. Called once a turn however many operations are under way.
  Progress poll(std::int64_t now_ns);
  void wait_for(WaitSet& set) const;
  const Failure& failure() const { return failure_; }

  // Names this membership and no other, on all ranks alike: in a tree each switch calls its part of the job otherwise.
  std::uint64_t generation() const { return generation_; }
  // Gives the switch up: nothing is sent, and nothing more taken from it.
  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  // The results that this rank has: of all chunks below `base`, and of base + i where bit i of `held` is set (the
  // lowest bit of a byte first). It has begun operations up to chunk `end`.
  struct ReceiveState {
    std::uint64_t base = 0;
    std::uint64_t end = 0;
    std::vector<std::byte> held;
  };
  ReceiveState receive_state() const;
  // A chunk's result as it came, header and all; empty where it is not kept.
  std::span<const std::byte> kept(std::uint64_t chunk) const;
  // A result that another rank kept: taken as if the switch had sent it, by the same checks, but for what its own
  // switch calls the job. False where they failed.
  bool accept_kept(std::span<const std::byte> packet, std::int64_t now_ns);
  // Where an operation begins on the line of chunks; its elements without a result, in ascending order.
  std::uint64_t first_chunk(int token) const { return active_[static_cast<std::size_t>(token)].first_chunk; }
  std::vector<Range> missing(int token) const;

  const protocol::Worker& machine() const { return machine_; }
  void share_path(bool with_own) { machine_.share_path(with_own); }
  const std::vector<int>& ranks() const { return ranks_; }
  // Why nothing reaches the switch, where its port knows; else empty.
  const std::string& path_error() const { return port_->path_error(); }
  const std::string& send_error() const { return port_->counters().last_send_error; }
  std::uint64_t drops(protocol::Drop reason) const { return drops_[static_cast<std::size_t>(reason)]; }

 private:
  struct Active {
    const Call* call = nullptr;
    const ContributionMap* map = nullptr;
    bool finished = false;
    std::uint64_t first_chunk = 0;
    std::uint64_t wire_bytes = 0;
    std::uint64_t result_bytes = 0;  // of packets whose results are here, each counted once
    std::uint32_t retransmissions = 0;
    int last_rank = -1;
  };
  static constexpr std::size_t kBatchPackets = 256;

  bool receive(std::int64_t now_ns);
  bool send(std::int64_t now_ns);
  void take(std::span<const std::byte> bytes, std::int64_t now_ns);
  // A packet with its tag, as it was before that: empty where the tag is wrong.
  std::span<const std::byte> opened(std::span<const std::byte> bytes);
  Active* find(std::uint32_t operation);
  void stage(const protocol::Worker::Send& send, const ContributionMap& map, iovec* pieces);
  // What another rank called at a chunk, against what this one did.
  Failure mismatch(const protocol::Header& theirs) const;

  bool accept(std::span<const std::byte> packet, std::int64_t now_ns);
  std::byte* kept_at(std::uint64_t chunk) const;

  int rank_of(std::uint16_t worker) const { return worker < ranks_.size() ? ranks_[worker] : -1; }

  std::uint64_t generation_;
  protocol::Worker machine_;
  std::optional<auth::PacketAuthenticator> authenticator_;         // of contributions
  std::optional<auth::PacketAuthenticator> result_authenticator_;  // of what the switch says
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
  bool blocked_ = false;  // the port had no room
  bool frozen_ = false;

  std::vector<std::byte> headers_;     // of a batch
  std::vector<std::byte> staging_;     // values of a batch that do not stand in one place as they travel
  std::vector<std::byte> zeros_;       // padding, and what changes nothing
  std::vector<std::byte> tags_;        // of a batch
  std::vector<std::byte> encrypted_;   // values and padding of a batch, where packets are encrypted
  std::vector<std::byte> plain_;       // a packet that came, decrypted
  std::unique_ptr<std::byte[]> kept_;  // packets of the newest results, without tags: of chunk c at c mod W
  std::vector<iovec> pieces_;
  std::vector<std::uint64_t> chunks_;
  std::vector<Active*> owners_;
  std::vector<bool> again_;
};

class InNetwork final : public Algorithm {
 public:
  // Preconditions: channel.can_start(), and there are elements on the line. Borrows all three.
  InNetwork(const Call& call, Channel& channel, const ContributionMap& map);
  ~InNetwork() override;
  int token() const { return token_; }
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override { channel_.wait_for(set); }
  std::vector<int> awaited() const override { return {}; }
  std::uint64_t settled_bytes() const override { return channel_.result_bytes(token_); }

 private:
  Channel& channel_;
  int token_;
};

}  // namespace netfold::collective
