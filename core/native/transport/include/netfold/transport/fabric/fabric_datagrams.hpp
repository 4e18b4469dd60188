// Datagrams as messages of a fabric: one endpoint with its own buffers, for one job's packets.
//
// A packet is one tagged message of a reliable-datagram endpoint (endpoint.hpp). It is copied into a registered buffer
// when it is sent, and read from the buffer in which it arrived. Reliable datagrams instead of FI_EP_DGRAM: every
// provider has them, EFA among them, and packets may be longer than the path's MTU. The provider repairs most losses
// before the protocol's timers do. A packet that the provider gives up is lost, and the protocol sends it again.
//
// Each job has an endpoint, as each job has a socket over UDP. Its addresses, connections and buffers end with it, and
// packets to one job fill no buffer of another.
//
// Authentication. A provider need not report the source of a message, so a peer is known by the tag of its messages.
// The tag is drawn at random for the peer and sent to it alone, over an authenticated connection. It replaces the
// source address of UDP; as with an address, an attacker who can read the network can copy it. A packet with an unknown
// tag comes from kUnknownPeer.
//
// Bounds. The number of buffers is set at construction; all take at most kMaxBufferBytes. A peer uses at most its share
// of the send buffers, so a peer that reads nothing does not block another. Where no receive buffer is posted, the
// provider keeps messages at the sender or in its own memory.
//
// Not thread-safe: its driver must serialise the calls.
#pragma once

#include <netfold/transport/datagrams.hpp>
#include <netfold/transport/fabric/endpoint.hpp>
#include <netfold/transport/mapping.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>
#include <vector>

namespace netfold::transport::fabric {

class FabricDatagrams final : public Datagrams {
 public:
  static constexpr std::size_t kMaxBufferBytes = 64 << 20;

  // Throws Error.
  // packet_bytes: of the longest packet; reduced to the provider's longest message.
  // in_flight_bytes: of packets in each direction, a peer. Buffers hold as much to send, and twice as much to receive.
  // peers: their number.
  FabricDatagrams(std::unique_ptr<Endpoint> endpoint, std::size_t packet_bytes, std::size_t in_flight_bytes,
                  std::size_t peers);
  ~FabricDatagrams() override;
  FabricDatagrams(const FabricDatagrams&) = delete;
  FabricDatagrams& operator=(const FabricDatagrams&) = delete;

  const Endpoint::Limits& limits() const { return endpoint_->limits(); }
  std::size_t packet_bytes() const { return packet_bytes_; }
  std::size_t buffer_bytes() const { return memory_.bytes(); }
  // The name by which peers reach this endpoint.
  std::vector<std::byte> name() const { return endpoint_->name(); }
  // The tag that this peer must give its packets.
  std::uint64_t tag(Peer peer) const { return peers_[peer].receive_tag; }
  // Connects a peer by the name of its endpoint and the tag of packets to it. Throws Error.
  void connect(Peer peer, std::span<const std::byte> name, std::uint64_t tag);

  std::size_t room(Peer to) const override { return std::min(free_.size(), most_under_way_ - peers_[to].under_way); }
  // Packets that the provider refuses for now wait in their buffers; a later `receive` sends them.
  std::size_t send(std::span<Run> runs) override;
  bool receive(const Take& take) override;
  WaitHint wait_hint(bool wants_room) override;
  bool needs_polling() const override { return true; }
  std::size_t receive_buffer_bytes() const override { return receive_buffers_.size() * packet_bytes_; }

 private:
  // Failed sends in succession that set path_error().
  static constexpr int kMaxFailures = 8;
  // Between two polls while a call was refused, or where the provider cannot wake this thread.
  static constexpr std::int64_t kPollIntervalNs = 200'000;
  // Between two polls while operations are in progress. A provider's repairs, connections in set-up and, with some
  // providers, the rest of sent messages wake no thread. The interval doubles at each poll, from the first to the last.
  static constexpr std::int64_t kFirstIntervalNs = 50'000;
  static constexpr std::int64_t kLastIntervalNs = 10'000'000;
  // Rounds of completions that one `receive` takes at most.
  static constexpr int kRounds = 4;

  struct SendBuffer : Work {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Peer to = kUnknownPeer;
  };
  struct ReceiveBuffer : Work {
    std::byte* data = nullptr;
  };
  struct PeerState {
    Endpoint::Peer address = 0;
    std::uint64_t receive_tag = 0;
    std::uint64_t send_tag = 0;
    std::size_t under_way = 0;        // send buffers in use
    std::deque<SendBuffer*> waiting;  // refused for now
    bool is_connected = false;
    bool has_sent = false;  // a packet of this peer has come
  };

  void take(const Run& run, std::size_t number);
  void send_waiting(PeerState& state);
  void release(SendBuffer& buffer);
  void post(ReceiveBuffer& buffer);
  void handle_received(const Completion& completion);
  void handle_failure(const Completion& completion);
  void note_loss(const std::string& why);
  void* descriptor() const { return registration_ == nullptr ? nullptr : registration_->descriptor(); }
  std::string provider() const { return "provider " + limits().provider; }

  // In this order: the endpoint ends before the memory that it may still know.
  Mapping memory_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<Registration> registration_;
  std::size_t packet_bytes_;
  std::vector<SendBuffer> send_buffers_;
  std::vector<ReceiveBuffer> receive_buffers_;
  std::vector<SendBuffer*> free_;
  std::vector<ReceiveBuffer*> unposted_;  // refused for now
  std::vector<PacketTrain> trains_;       // of one batch
  std::vector<ReceiveBuffer*> read_;      // the buffers of that batch
  std::vector<PeerState> peers_;
  std::unordered_map<std::uint64_t, Peer> by_tag_;
  std::size_t most_under_way_ = 0;  // to one peer
  std::size_t waiting_ = 0;         // packets, to all peers
  std::array<Completion, 32> batch_;
  std::size_t silent_peers_ = 0;  // without has_sent
  std::int64_t poll_interval_ns_ = kFirstIntervalNs;
  int failed_sends_ = 0;
  int pid_;
};

}  // namespace netfold::transport::fabric
