// All-reduce inside the network: this rank's end of the aggregation protocol.
//
// One step. Bytes sent by a rank for n bytes of tensor: n and a header a packet, whatever the number of ranks
// (a ring sends 2n(P-1)/P). The values are gathered from the tensor by the socket call and results are
// written in place; a chunk's contribution is never needed again once its result is here, since the result
// proves that it was counted.
//
// A Channel is a group's membership of a job on a switch: one socket, one protocol machine, several
// operations at once that stream through one window. An InNetwork is one operation in it.
#pragma once

#include <netfold/collective/algorithm.hpp>
#include <netfold/protocol/worker.hpp>
#include <netfold/transport/udp.hpp>

#include <array>
#include <memory>

namespace netfold::collective {

class Channel {
 public:
  // `ranks`: what the job's workers, by number in the whole job, are called in this group; `rank`: this one. In a tree
  // of switches the number that a worker has at its own (in `config`) is another.
  Channel(const protocol::WorkerConfig& config, std::vector<int> ranks, int rank,
          std::unique_ptr<transport::UdpSocket> socket, const transport::Address& to);

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

  const protocol::Worker& machine() const { return machine_; }
  const transport::UdpSocket& socket() const { return *socket_; }
  std::uint64_t drops(protocol::Drop reason) const { return drops_[static_cast<std::size_t>(reason)]; }

 private:
  struct Active {
    const Call* call = nullptr;
    bool finished = false;
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

  int rank_of(std::uint16_t worker) const { return worker < ranks_.size() ? ranks_[worker] : -1; }

  protocol::Worker machine_;
  std::vector<int> ranks_;
  int rank_;
  std::unique_ptr<transport::UdpSocket> socket_;
  transport::Address to_;
  Failure failure_;
  std::array<Active, kMaxOperations> active_;
  std::array<std::uint64_t, protocol::kDropCount> drops_{};
  std::int64_t polled_ns_ = -1;
  Progress polled_ = Progress::idle;
  bool blocked_ = false;  // the socket had no room

  std::vector<std::byte> headers_;  // of a batch
  std::vector<std::byte> staging_;  // values of a batch, in the wire format where it differs from the tensor's
  std::vector<std::byte> zeros_;    // the tail chunk's padding
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
