// Datagrams over UDP: GSO and sendmmsg on the way out, recvmmsg and GRO on the way in.
//
// Sending. All packets of a job have one length, so a run of packets to one destination is one GSO super-packet: the
// kernel walks its stack once for up to 44 of them. Each packet is gathered from pieces (the header here, the values in
// the user's tensor) without a copy. Where the kernel or the path refuses GSO, packets go one by one.
// Receiving. The kernel returns super-packets with the length of their segments, as packet trains.
// A peer is an address. Where the socket is bound to all local addresses, a peer also has a local source address.
#pragma once

#include <netfold/transport/datagrams.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace netfold::transport {

class UdpSocket final : public Datagrams {
 public:
  // The kernel takes at most 64 segments and 65,507 bytes a super-packet (linux/udp.h).
  static constexpr std::size_t kMaxSegments = 64;
  static constexpr std::size_t kMaxSuperBytes = 65000;
  static constexpr std::size_t kMessagesPerCall = 16;

  // How many packets of `packet_bytes` bytes one message to the kernel takes.
  static constexpr std::size_t packets_per_message(std::size_t packet_bytes) {
    return std::clamp<std::size_t>(kMaxSuperBytes / packet_bytes, 1, kMaxSegments);
  }

  // Throws std::system_error.
  // local: the address to bind to; port 0: any.
  // buffer_bytes: requested for each direction; the kernel may grant less.
  UdpSocket(const Address& local, std::size_t buffer_bytes);

  int fd() const { return fd_.get(); }
  Address local() const { return Address::local_of(fd_.get()); }
  // Returns the number of the peer at `address`; the same number for the same address.
  // source: the local address that packets to this peer come from; its port is ignored. Without it the kernel takes the
  //   address of the route. A host with several addresses needs it: a peer and its firewall expect answers from the
  //   address that the peer sent to.
  Peer add(const Address& address, const std::optional<Address>& source = std::nullopt);

  // Unlimited, since the kernel does not tell in advance.
  std::size_t room(Peer) const override { return ~std::size_t{0}; }
  // Sends the runs in order, until the kernel has no room. Packets that this host refuses to send (EPERM of a firewall,
  // EMSGSIZE of an interface, ENETUNREACH, ...) count as sent and lost, and in `counters`.
  std::size_t send(std::span<Run> runs) override;
  bool receive(const Take& take) override;
  WaitHint wait_hint(bool wants_room) override;
  std::size_t receive_buffer_bytes() const override { return receive_buffer_bytes_; }

 private:
  struct Hash {
    std::size_t operator()(const Address& address) const;
  };

  // The control data of one message to the kernel: the source address and the length of GSO segments.
  static constexpr std::size_t kSourceBytes = CMSG_SPACE(sizeof(in6_pktinfo));
  static constexpr std::size_t kSegmentBytes = CMSG_SPACE(sizeof(std::uint16_t));
  struct Destination {
    Address address;
    alignas(cmsghdr) std::array<char, kSourceBytes> source{};  // a control message
    std::size_t source_bytes = 0;                              // 0: no source address
    void set_source(const Address& local);
  };

  void note_refusal(int error, const Address& to);

  Fd fd_;
  bool gso_ = true;
  std::size_t receive_buffer_bytes_ = 0;
  std::vector<Destination> peers_;
  std::unordered_map<Address, Peer, Hash> numbers_;
  std::size_t batch_ = 0;  // messages that the next call requests
  std::vector<PacketTrain> trains_;
  std::unique_ptr<std::byte[]> receive_area_;  // left uninitialised, so that unused pages cost no memory
  std::vector<mmsghdr> receive_messages_;
  std::vector<iovec> receive_iovecs_;
  std::vector<Address> receive_sources_;
  std::vector<std::byte> receive_controls_;
};

}  // namespace netfold::transport
