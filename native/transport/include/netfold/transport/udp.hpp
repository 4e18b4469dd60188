// Datagrams in batches: GSO and sendmmsg on the way out, recvmmsg and GRO on the way in.
//
// Sending. All packets of a job have one length, so a run of packets to one destination is one GSO
// super-packet: the kernel walks its stack once for up to 44 of them. Each packet is gathered from pieces
// (header here, values in the user's tensor), never copied together first. Where the kernel or the path
// refuses GSO, packets go one by one. Receiving. The kernel hands back super-packets with the length of their
// segments; `receive` cuts them up. Nothing here blocks, and nothing here knows what a packet means.
#pragma once

#include <sys/uio.h>
#include <netfold/transport/socket.hpp>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace netfold::transport {

class UdpSocket {
 public:
  // The kernel takes at most 64 segments and 65,507 bytes a super-packet (linux/udp.h).
  static constexpr std::size_t kMaxSegments = 64;
  static constexpr std::size_t kMaxSuperBytes = 65000;
  static constexpr std::size_t kMessagesPerCall = 16;

  // Binds to `local` (port 0: any). `buffer_bytes` is asked for both directions. Throws std::system_error.
  UdpSocket(const Address& local, int buffer_bytes);

  int fd() const { return fd_.get(); }
  Address local() const { return Address::local_of(fd_.get()); }
  int receive_buffer_bytes() const { return receive_buffer_bytes_; }
  bool gso() const { return gso_; }

  // A run of packets, each `packet_bytes` long and made of the same number of consecutive pieces.
  struct Run {
    const Address* to = nullptr;
    std::span<const iovec> pieces;
    std::size_t pieces_per_packet = 1;
    std::size_t packet_bytes = 0;
  };
  // Sends runs in order until one is refused for lack of room; returns packets taken, counted over all runs
  // (a prefix). Errors about a destination (ECONNREFUSED, EHOSTUNREACH, ...) count as sent: repair is the
  // protocol's. EPERM (a firewall's word) and EMSGSIZE (the path's MTU) throw std::system_error.
  std::size_t send(std::span<const Run> runs);

  // Receives what is there, at most one batch; calls `packet(bytes, source)` for each datagram, in order.
  // `bytes` lives for the call. Returns the number of datagrams; 0 means empty.
  using Packet = std::function<void(std::span<const std::byte>, const Address&)>;
  std::size_t receive(const Packet& packet);

  // Counters for diagnosis.
  std::uint64_t receive_calls = 0;
  std::uint64_t received_datagrams = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t send_calls = 0;
  std::uint64_t sent_datagrams = 0;

 private:
  Fd fd_;
  bool gso_ = true;
  int receive_buffer_bytes_ = 0;
  std::vector<std::byte> receive_area_;
  std::vector<mmsghdr> receive_messages_;
  std::vector<iovec> receive_iovecs_;
  std::vector<Address> receive_sources_;
  std::vector<std::byte> receive_controls_;
};

}  // namespace netfold::transport
