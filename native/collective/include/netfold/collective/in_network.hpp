// All-reduce inside the network: this rank's end of the aggregation protocol.
//
// One step. Bytes sent by a rank for n bytes of tensor: n and a header a packet, whatever the number of ranks
// (a ring sends 2n(P-1)/P). The values are gathered from the tensor by the socket call and results are
// written in place; a chunk's contribution is never needed again once its result is here, since the result
// proves that it was counted.
//
// A Channel is a group's membership of a job on a switch: one socket, one protocol machine, several
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

#include <netfold/collective/algorithm.hpp>
#include <netfold/protocol/worker.hpp>
#include <netfold/transport/udp.hpp>

#include <array>
#include <memory>

namespace netfold::collective {

// A part of an operation's elements.
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

class Channel {
 public:
  // `ranks`: what the job's workers, by number, are called in this group.
  Channel(const protocol::WorkerConfig& config, std::vector<int> ranks, std::unique_ptr<transport::UdpSocket> socket,
          const transport::Address& to);

  static constexpr std::size_t kMaxOperations = protocol::Worker::kMaxOperations;

  bool can_start() const;
  // Operations start in the same order on every rank. The call's buffer is borrowed until finished(token).
  int start(const Call& call);
  bool finished(int token) const { return active_[static_cast<std::size_t>(token)].finished; }
  std::uint64_t wire_bytes(int token) const { return active_[static_cast<std::size_t>(token)].wire_bytes; }
  std::uint32_t retransmissions(int token) const { return active_[static_cast<std::size_t>(token)].retransmissions; }
  // The rank whose contribution came last, of the newest result.
  int last_rank(int token) const { return active_[static_cast<std::size_t>(token)].last_rank; }
  void release(int token) { active_[static_cast<std::size_t>(token)] = Active{}; }

  // Receives, decodes, sends. Called once a turn however many operations are under way.
  Progress poll(std::int64_t now_ns);
  void wait_for(WaitSet& set) const;
  const Failure& failure() const { return failure_; }

  // Names this membership and no other: a life of a job has an epoch, a switch's an incarnation.
  std::uint64_t life() const;
  // Gives the switch up: nothing is sent, and nothing more taken from it.
  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  // The results that this rank has: of all chunks below `base`, and of base + i where bit i of `held` is set (the
  // lowest bit of a byte first). It has begun operations up to chunk `end`.
  struct Words {
    std::uint64_t base = 0;
    std::uint64_t end = 0;
    std::vector<std::byte> held;
  };
  Words words() const;
  // A chunk's result as it came, header and all; empty where it is not kept.
  std::span<const std::byte> kept(std::uint64_t chunk) const;
  // A result that another rank kept: taken as if the switch had sent it, by the same checks. False where they failed.
  bool accept(std::span<const std::byte> packet, std::int64_t now_ns);
  // Where an operation begins on the line of chunks; its elements without a result, in ascending order.
  std::uint64_t first_chunk(int token) const { return active_[static_cast<std::size_t>(token)].first_chunk; }
  std::vector<Range> missing(int token) const;

  const protocol::Worker& machine() const { return machine_; }
  const std::vector<int>& ranks() const { return ranks_; }
  const transport::UdpSocket& socket() const { return *socket_; }
  std::uint64_t drops(protocol::Drop reason) const { return drops_[static_cast<std::size_t>(reason)]; }

 private:
  struct Active {
    const Call* call = nullptr;
    bool finished = false;
    std::uint64_t first_chunk = 0;
    std::uint64_t wire_bytes = 0;
    std::uint32_t retransmissions = 0;
    int last_rank = -1;
  };
  static constexpr std::size_t kBatchPackets = 256;

  bool receive(std::int64_t now_ns);
  bool send(std::int64_t now_ns);
  void take(std::span<const std::byte> bytes, const transport::Address& source, std::int64_t now_ns);
  Active* find(std::uint32_t operation);
  std::size_t stage(const protocol::Worker::Send& send, const Call& call, iovec* pieces);

  std::byte* kept_at(std::uint64_t chunk) const;

  int rank_of(std::uint16_t worker) const { return worker < ranks_.size() ? ranks_[worker] : -1; }

  protocol::Worker machine_;
  std::vector<int> ranks_;
  std::unique_ptr<transport::UdpSocket> socket_;
  transport::Address to_;
  Failure failure_;
  std::array<Active, kMaxOperations> active_;
  std::array<std::uint64_t, protocol::kDropCount> drops_{};
  std::int64_t polled_ns_ = -1;
  Progress polled_ = Progress::idle;
  bool blocked_ = false;  // the socket had no room
  bool frozen_ = false;

  std::vector<std::byte> headers_;     // of a batch
  std::vector<std::byte> staging_;     // values of a batch, in the wire format where it differs from the tensor's
  std::vector<std::byte> zeros_;       // the tail chunk's padding
  std::unique_ptr<std::byte[]> kept_;  // packets of the newest results: of chunk c at c mod W
  std::vector<iovec> pieces_;
  std::vector<std::uint64_t> chunks_;
  std::vector<Active*> owners_;
  std::vector<bool> again_;
};

class InNetwork final : public Algorithm {
 public:
  // Precondition: channel.can_start(). Borrows both.
  InNetwork(const Call& call, Channel& channel, int ranks);
  ~InNetwork() override;
  int token() const { return token_; }
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override { channel_.wait_for(set); }
  std::vector<int> awaited() const override { return {}; }

 private:
  const Call& call_;
  Channel& channel_;
  int ranks_;
  int token_;
};

}  // namespace netfold::collective
