#include <netinet/udp.h>
#include <poll.h>
#include <netfold/transport/udp/udp_socket.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace netfold::transport {
namespace {

constexpr std::size_t kReceiveBytes = 65536;
// Messages a receive call: at least one of each worker of a small job. kBatchBytes: the target for their total size.
constexpr std::size_t kLeastBatch = 8;
constexpr std::size_t kReceiveBatch = 32;
constexpr std::size_t kBatchBytes = 1024 << 10;
constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(int));
// UIO_MAXIOV: the most pieces in one message.
constexpr std::size_t kMaxPieces = 1024;

// Fills a control message; returns the bytes that it takes.
template <class Value>
std::size_t put_control(cmsghdr* control, int level, int type, const Value& value) {
  control->cmsg_level = level;
  control->cmsg_type = type;
  control->cmsg_len = CMSG_LEN(sizeof value);
  std::memcpy(CMSG_DATA(control), &value, sizeof value);
  return CMSG_SPACE(sizeof value);
}

}  // namespace

UdpSocket::UdpSocket(const Address& local, std::size_t buffer_bytes) {
  const int wanted_bytes = static_cast<int>(std::min<std::size_t>(buffer_bytes, std::numeric_limits<int>::max()));
  fd_ = Fd(::socket(local.storage.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_) throw_errno("udp socket");
  if (::bind(fd_.get(), local.get(), local.length) != 0) throw_errno("bind udp " + local.text());
  receive_buffer_bytes_ = static_cast<std::size_t>(set_receive_buffer(fd_.get(), wanted_bytes));
  set_send_buffer(fd_.get(), wanted_bytes);
  // No fragments: the loss of one fragment would lose the packet. The protocol probed the packet length itself, so the
  // socket ignores what ICMP messages report about the path; anybody can forge them.
  if (local.storage.ss_family == AF_INET) {
    const int discover = IP_PMTUDISC_PROBE;
    setsockopt(fd_.get(), IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof discover);
  } else {
    const int discover = IPV6_PMTUDISC_PROBE;
    setsockopt(fd_.get(), IPPROTO_IPV6, IPV6_MTU_DISCOVER, &discover, sizeof discover);
  }
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_UDP, UDP_GRO, &on, sizeof on);  // without GRO, datagrams come one by one

  receive_area_ = std::make_unique_for_overwrite<std::byte[]>(kReceiveBatch * kReceiveBytes);
  receive_messages_.resize(kReceiveBatch);
  trains_.resize(kReceiveBatch);
  batch_ = kLeastBatch;
  receive_iovecs_.resize(kReceiveBatch);
  receive_sources_.resize(kReceiveBatch);
  receive_controls_.resize(kReceiveBatch * kControlBytes);
}

UdpSocket::Peer UdpSocket::add(const Address& address, const std::optional<Address>& source) {
  const auto [found, is_new] = numbers_.try_emplace(address, static_cast<Peer>(peers_.size()));
  if (is_new) peers_.push_back({.address = address});
  if (source) peers_[found->second].set_source(*source);
  return found->second;
}

// By IP_PKTINFO (ip(7)) or IPV6_PKTINFO (RFC 3542, section 6.1). The route still chooses the interface.
void UdpSocket::Destination::set_source(const Address& local) {
  source.fill(0);
  auto* control = reinterpret_cast<cmsghdr*>(source.data());
  if (local.storage.ss_family == AF_INET) {
    in_pktinfo info{};
    info.ipi_spec_dst = reinterpret_cast<const sockaddr_in&>(local.storage).sin_addr;
    source_bytes = put_control(control, IPPROTO_IP, IP_PKTINFO, info);
  } else {
    in6_pktinfo info{};
    info.ipi6_addr = reinterpret_cast<const sockaddr_in6&>(local.storage).sin6_addr;
    source_bytes = put_control(control, IPPROTO_IPV6, IPV6_PKTINFO, info);
  }
}

// Hashes the fields that Address::operator== compares.
std::size_t UdpSocket::Hash::operator()(const Address& address) const {
  // Of IPv6, the lower half differs between the hosts of one network.
  std::size_t host = 0;
  const std::string_view bytes = address.host();
  const std::size_t count = std::min(sizeof host, bytes.size());
  std::memcpy(&host, bytes.data() + bytes.size() - count, count);
  return host * 0x9e3779b97f4a7c15u ^ address.port();
}

UdpSocket::WaitHint UdpSocket::wait_hint(bool wants_room) {
  return {.fd = fd_.get(), .events = static_cast<short>(POLLIN | (wants_room ? POLLOUT : 0))};
}

void UdpSocket::note_refusal(int error, const Address& to) {
  if (++counters_.send_errors > 1 && error == counters_.last_send_errno) return;
  counters_.last_send_errno = error;
  counters_.last_send_error = "send to " + to.text() + ": " + std::generic_category().message(error);
}

std::size_t UdpSocket::send(std::span<Run> runs) {
  struct alignas(cmsghdr) Control {
    char bytes[kSourceBytes + kSegmentBytes];
  };
  std::array<mmsghdr, kMessagesPerCall> messages;
  std::array<Control, kMessagesPerCall> controls;
  std::array<std::size_t, kMessagesPerCall> packets_of;
  std::array<Run*, kMessagesPerCall> run_of;
  std::size_t total = 0;
  std::size_t first = 0;  // the first run with packets that are not taken
  for (Run& run : runs) run.taken = 0;

  for (;;) {
    while (first < runs.size() && runs[first].taken == runs[first].pieces.size() / runs[first].pieces_per_packet)
      ++first;
    std::size_t count = 0;
    for (std::size_t index = first; index < runs.size() && count < kMessagesPerCall; ++index) {
      Run& run = runs[index];
      const Destination& to = peers_[run.to];
      const std::size_t run_packets = run.pieces.size() / run.pieces_per_packet;
      const std::size_t most = gso_ ? std::min(packets_per_message(run.packet_bytes),
                                               std::max<std::size_t>(1, kMaxPieces / run.pieces_per_packet))
                                    : 1;
      for (std::size_t next = run.taken; next < run_packets && count < kMessagesPerCall; next += packets_of[count++]) {
        const std::size_t packets = std::min(most, run_packets - next);
        packets_of[count] = packets;
        run_of[count] = &run;
        msghdr& header = messages[count].msg_hdr;
        header = msghdr{};
        header.msg_name = const_cast<sockaddr*>(to.address.get());
        header.msg_namelen = to.address.length;
        header.msg_iov = const_cast<iovec*>(run.pieces.data() + next * run.pieces_per_packet);
        header.msg_iovlen = packets * run.pieces_per_packet;
        std::size_t control_bytes = to.source_bytes;
        if (control_bytes > 0) std::memcpy(controls[count].bytes, to.source.data(), control_bytes);
        if (packets > 1) {
          auto* control = reinterpret_cast<cmsghdr*>(controls[count].bytes + control_bytes);
          control_bytes += put_control(control, IPPROTO_UDP, UDP_SEGMENT, static_cast<std::uint16_t>(run.packet_bytes));
        }
        if (control_bytes > 0) {
          header.msg_control = controls[count].bytes;
          header.msg_controllen = control_bytes;
        }
      }
    }
    if (count == 0) return total;

    const int sent = ::sendmmsg(fd_.get(), messages.data(), static_cast<unsigned>(count), 0);
    std::size_t taken = sent < 0 ? 0 : static_cast<std::size_t>(sent);
    if (sent < 0) {
      if (errno == EAGAIN || errno == ENOBUFS) return total;
      if (errno == EINTR) continue;
      if (gso_ && packets_of[0] > 1 && (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP)) {
        gso_ = false;  // no checksum offload on this path: send packets one by one
      } else {
        taken = 1;  // lost on this host: the protocol sends it again, or finds that no packet passes
        note_refusal(errno, peers_[run_of[0]->to].address);
      }
    }
    for (std::size_t i = 0; i < taken; ++i) {
      run_of[i]->taken += packets_of[i];
      total += packets_of[i];
    }
  }
}

bool UdpSocket::receive(const Take& take) {
  for (std::size_t i = 0; i < batch_; ++i) {
    receive_iovecs_[i] = {receive_area_.get() + i * kReceiveBytes, kReceiveBytes};
    msghdr& header = receive_messages_[i].msg_hdr;
    header = msghdr{};
    header.msg_name = &receive_sources_[i].storage;
    header.msg_namelen = sizeof receive_sources_[i].storage;
    header.msg_iov = &receive_iovecs_[i];
    header.msg_iovlen = 1;
    header.msg_control = receive_controls_.data() + i * kControlBytes;
    header.msg_controllen = kControlBytes;
  }
  const int count =
      ::recvmmsg(fd_.get(), receive_messages_.data(), static_cast<unsigned>(batch_), MSG_DONTWAIT, nullptr);
  ++counters_.receive_calls;
  if (count <= 0) return false;  // empty, interrupted, or an ICMP error of an earlier send

  std::size_t total = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    msghdr& header = receive_messages_[i].msg_hdr;
    const std::size_t bytes = receive_messages_[i].msg_len;
    Address& from = receive_sources_[i];
    from.length = header.msg_namelen;
    const auto known = numbers_.find(from);
    std::size_t segment = bytes;
    for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr; control = CMSG_NXTHDR(&header, control)) {
      if (control->cmsg_level == IPPROTO_UDP && control->cmsg_type == UDP_GRO) {
        int size = 0;
        std::memcpy(&size, CMSG_DATA(control), sizeof size);
        if (size > 0) segment = static_cast<std::size_t>(size);
      }
    }
    trains_[i] = {.bytes = {static_cast<const std::byte*>(header.msg_iov[0].iov_base), bytes},
                  .packet_bytes = segment,
                  .source = known == numbers_.end() ? kUnknownPeer : known->second};
    counters_.received_datagrams += bytes == 0 ? 1 : (bytes + segment - 1) / segment;
    total += bytes;
  }
  // Receive long trains in few buffers, so that they are in the cache when they are read; single packets in many.
  const std::size_t average = std::max<std::size_t>(1, total / static_cast<std::size_t>(count));
  batch_ = std::clamp(kBatchBytes / average, kLeastBatch, kReceiveBatch);
  take({trains_.data(), static_cast<std::size_t>(count)});
  return true;
}

}  // namespace netfold::transport
