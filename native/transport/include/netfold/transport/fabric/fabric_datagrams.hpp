// Datagrams as messages of a fabric: one endpoint, with buffers of its own, for one job's packets.
//
// A packet is one tagged message of a reliable-datagram endpoint (endpoint.hpp), copied into a registered buffer as it is
// sent, and read where it arrived. Reliable datagrams, and not FI_EP_DGRAM: every provider has them, EFA's queue pairs
// among them, and packets may be longer than the path's MTU. What the provider repairs itself the protocol's timers
// need not; what it gives up is lost, and the protocol sends it again.
//
// An endpoint a job, as there is a socket a job over UDP: its addresses, connections and buffers end with it, and what
// is thrown at one job fills no buffer of another.
//
// WHO MAY SPEAK. A provider need not say where a message is from, so a peer is known by the tag of what it sends: drawn
// at random for it and told to it alone, over a connection where both ends know each other. It is what a source address
// is over UDP, and as that it can be copied by who reads the wire. What has a tag that nobody was given is a
// stranger's.
//
// BOUNDS. So many buffers to send from and to receive into as the port was made with, at most kMaxBufferBytes in all. A
// peer takes up no more than its part of those to send from: one that reads nothing holds up no other. Where no buffer
// is posted the provider keeps what comes waiting at its sender, or in memory of its own.
//
// Not thread-safe: whoever drives takes turns.
#pragma once

#include <netfold/transport/datagrams.hpp>
#include <netfold/transport/fabric/endpoint.hpp>
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
  static constexpr std::size_t kMaxNameBytes = 512;

  // `packet_bytes`: of the longest packet, and less where the provider takes no such messages. `in_flight_bytes`: of
  // packets each way, with each of `peers`; there is room to send as much, and to receive twice as much. Throws Error.
  FabricDatagrams(std::unique_ptr<Endpoint> endpoint, std::size_t packet_bytes, std::size_t in_flight_bytes,
                  std::size_t peers);
  ~FabricDatagrams() override;
  FabricDatagrams(const FabricDatagrams&) = delete;
  FabricDatagrams& operator=(const FabricDatagrams&) = delete;

  const Endpoint::Limits& limits() const { return endpoint_->limits(); }
  std::size_t packet_bytes() const { return packet_bytes_; }
  std::size_t buffer_bytes() const { return memory_.get_deleter().bytes; }
  // What others need to reach this endpoint.
  std::vector<std::byte> name() const { return endpoint_->name(); }
  // Of `peers`: what it has to tag its packets with.
  std::uint64_t tag(Peer peer) const { return peers_[peer].tag_in; }
  // Where that peer is, and how it wants packets to be tagged. Throws Error.
  void connect(Peer peer, std::span<const std::byte> name, std::uint64_t tag);

  std::size_t room(Peer to) const override { return std::min(free_.size(), most_under_way_ - peers_[to].under_way); }
  // What the provider refuses for now waits in its buffer, and goes with a later `receive`.
  std::size_t send(std::span<Run> runs) override;
  bool receive(const Take& take) override;
  WaitHint wait_hint(bool wants_room) override;
  bool needs_polling() const override { return true; }
  std::size_t receive_buffer_bytes() const override { return receivings_.size() * packet_bytes_; }
  const std::string& path_error() const override { return path_error_; }

 private:
  // Sends that failed one after another before there is said to be trouble.
  static constexpr int kMaxFailures = 8;
  // Between two looks at what was refused, or cannot wake us.
  static constexpr std::int64_t kPollIntervalNs = 200'000;
  // While something is under way: a provider's repairs, connections that are being made and, with some providers, the
  // rest of what was sent wake nobody. The first look after so long, each next one after twice as long.
  static constexpr std::int64_t kFirstLookNs = 50'000;
  static constexpr std::int64_t kLastLookNs = 10'000'000;
  static constexpr int kRounds = 4;

  struct Sending : Work {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Peer to = kUnknownPeer;
  };
  struct Receiving : Work {
    std::byte* data = nullptr;
  };
  struct PeerState {
    Endpoint::Peer at = 0;
    std::uint64_t tag_in = 0;
    std::uint64_t tag_out = 0;
    std::size_t under_way = 0;  // in buffers to send from
    std::deque<Sending*> waiting;
    bool connected = false;
    bool heard = false;
  };

  void take(const Run& run, std::size_t number);
  void push(PeerState& state);
  void release(Sending& sending);
  void post(Receiving& receiving);
  void failed(const Completion& completion);
  void lost(const std::string& why);

  // Unmaps it.
  struct Memory {
    std::size_t bytes;
    void operator()(std::byte* first) const;
  };

  // In this order: the endpoint goes before the memory that it may still know.
  std::unique_ptr<std::byte, Memory> memory_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<Registration> registration_;
  std::size_t packet_bytes_;
  std::vector<Sending> sendings_;
  std::vector<Receiving> receivings_;
  std::vector<Sending*> free_;
  std::vector<Receiving*> unposted_;  // refused for now
  std::vector<PacketTrain> trains_;   // of one batch, and where they lie
  std::vector<Receiving*> read_;
  std::vector<PeerState> peers_;
  std::unordered_map<std::uint64_t, Peer> by_tag_;
  std::size_t most_under_way_ = 0;  // to one peer
  std::size_t waiting_ = 0;         // to all
  std::array<Completion, 32> batch_;
  std::size_t unheard_ = 0;  // peers
  std::int64_t look_ns_ = kFirstLookNs;
  int failed_sends_ = 0;
  std::string path_error_;
  int pid_;
};

}  // namespace netfold::transport::fabric
