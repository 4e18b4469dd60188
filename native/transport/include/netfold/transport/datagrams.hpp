// Packets in batches, to peers and from them: what the aggregation protocol goes over.
//
// A packet comes whole or not at all, once or more often, in any order: repair is the protocol's. A peer is a number of
// this port's own; where it is, and how what comes from it is known, is said when it is made known to the port
// (UdpSocket: by its address; fabric::FabricDatagrams: by a tag that only it was told). What comes from nobody that is
// known is handed out as a stranger's. Nothing here blocks, and nothing here knows what a packet means.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace netfold::transport {

class Datagrams {
 public:
  using Peer = std::uint32_t;
  static constexpr Peer kUnknownPeer = 0xffffffff;

  // Packets to one peer, each `packet_bytes` long and made of the same number of consecutive pieces.
  struct Run {
    Peer to = kUnknownPeer;
    std::span<const iovec> pieces;
    std::size_t pieces_per_packet = 1;
    std::size_t packet_bytes = 0;
    std::size_t taken = 0;  // filled in: packets, from the first on
  };

  // How a sleeper is woken.
  struct WaitHint {
    int fd = -1;  // for `events`; -1: by the nap alone
    short events = 0;
    std::int64_t poll_after_ns = -1;  // look again after so long in any case; 0: at once, -1: there is no need to
  };

  virtual ~Datagrams() = default;

  // So many packets to a peer are taken now; of more some may be refused. Who counts its packets asks first: a number
  // that was given out and not sent looks like a loss at the other end.
  virtual std::size_t room(Peer to) const = 0;
  // Takes packets of each run as far as there is room; how many in all. What is lost on the way, or
  // refused by this host, counts as taken; refusals are counted. Throws std::system_error where the provider fails.
  virtual std::size_t send(std::span<Run> runs) = 0;

  // Packets that came together from one source: of `packet_bytes` each, but the last, which may be shorter. No bytes:
  // one packet of none.
  struct PacketTrain {
    std::span<const std::byte> bytes;
    std::size_t packet_bytes = 0;
    Peer source = kUnknownPeer;
  };
  // Receives what is there, at most one batch, and calls `take` with it, once, unless it is empty. The bytes live for
  // the call, in which packets may be sent. Whether anything happened.
  class Take;
  virtual bool receive(const Take& take) = 0;

  // `wants_room`: for a packet that was not taken. Good until the next call of anything else here.
  virtual WaitHint wait_hint(bool wants_room) = 0;
  // Whether that has to be asked before each sleep; else the descriptor alone wakes whoever waits for it.
  virtual bool needs_polling() const { return false; }

  // What holds packets that have come and were not received.
  virtual std::size_t receive_buffer_bytes() const = 0;
  // Why nothing that is sent arrives any more, where that is known; else empty.
  virtual const std::string& path_error() const = 0;

  struct Counters {
    std::uint64_t receive_calls = 0;
    std::uint64_t received_datagrams = 0;
    std::uint64_t send_errors = 0;  // batches that this host or a provider refused, or says did not arrive
    int last_send_errno = 0;        // of UDP
    std::string last_send_error;
  };
  const Counters& counters() const { return counters_; }

 protected:
  Counters counters_;
};

// A callable that lives at least as long as the call it is passed to: a pointer to it, and one to how it is called.
class Datagrams::Take {
 public:
  template <class Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, Take>)
  Take(Callable&& callable)  // not explicit: as a parameter it is made of any callable
      : callable_(const_cast<void*>(static_cast<const void*>(&callable))),
        call_([](void* of, std::span<const PacketTrain> batch) {
          (*static_cast<std::remove_reference_t<Callable>*>(of))(batch);
        }) {}
  void operator()(std::span<const PacketTrain> batch) const { call_(callable_, batch); }

 private:
  void* callable_;
  void (*call_)(void*, std::span<const PacketTrain>);
};

// `packet(bytes)` for each of a train.
template <class Packet>
void for_each_packet(const Datagrams::PacketTrain& train, const Packet& packet) {
  std::size_t offset = 0;
  do {
    packet(train.bytes.subspan(offset, std::min(train.packet_bytes, train.bytes.size() - offset)));
    offset += train.packet_bytes;
  } while (offset < train.bytes.size());
}

}  // namespace netfold::transport
