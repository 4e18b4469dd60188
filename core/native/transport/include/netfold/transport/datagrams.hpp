// Packets in batches, to numbered peers and from them: the transport of the aggregation protocol.
//
// A packet arrives whole or not at all, once or several times, in any order; the protocol repairs. The implementation
// numbers the peers. Its function that adds a peer says where the peer is, and how its packets are recognised:
// UdpSocket by their address, fabric::FabricDatagrams by a tag that only this peer was given. Packets of unknown peers
// come with kUnknownPeer. No call blocks, and no packet is interpreted.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

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
    std::size_t taken = 0;  // result: packets taken, from the first on
  };

  // How to wake a sleeping thread.
  struct WaitHint {
    int fd = -1;                      // poll it for `events`; -1: only the timer wakes
    short events = 0;                 // POLLIN, POLLOUT
    std::int64_t poll_after_ns = -1;  // look again after this time in any case; 0: at once; -1: not needed
  };

  virtual ~Datagrams() = default;

  // How many packets to a peer are taken now. More may be refused. A caller that numbers its packets asks first, since
  // a number that was assigned but not sent looks like a loss at the other end.
  virtual std::size_t room(Peer to) const = 0;
  // Takes packets of each run while there is room; returns their number. Packets that are lost on the path or refused
  // by this host count as taken; refusals are counted. Throws std::system_error where the provider fails.
  virtual std::size_t send(std::span<Run> runs) = 0;

  // Packets that came together from one source. All have `packet_bytes` bytes, but the last may be shorter. A train
  // without bytes is one empty packet.
  struct PacketTrain {
    std::span<const std::byte> bytes;
    std::size_t packet_bytes = 0;
    Peer source = kUnknownPeer;
  };
  // Receives at most one batch and calls `take` once with it, unless it is empty. The bytes are valid during that call;
  // `take` may send packets. Returns whether anything happened.
  class Take;
  virtual bool receive(const Take& take) = 0;

  // Valid until the next call of any other function here.
  // wants_room: also wake once a refused packet may be taken.
  virtual WaitHint wait_hint(bool wants_room) = 0;
  // Whether a thread must ask for a new hint before each sleep; else the descriptor alone wakes it.
  virtual bool needs_polling() const { return false; }

  // The size of the memory that holds arrived packets until they are received.
  virtual std::size_t receive_buffer_bytes() const = 0;
  // Why sent packets do not arrive any more, where that is known; else empty.
  const std::string& path_error() const { return path_error_; }

  struct Counters {
    std::uint64_t receive_calls = 0;
    std::uint64_t received_datagrams = 0;
    std::uint64_t send_errors = 0;  // batches that this host or a provider refused or reported as failed
    int last_send_errno = 0;        // UDP only
    std::string last_send_error;
  };
  const Counters& counters() const { return counters_; }

 protected:
  Counters counters_;
  std::string path_error_;
};

// A reference to a callable that lives at least as long as the call that gets it.
class Datagrams::Take {
 public:
  template <class Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, Take>)
  Take(Callable&& callable)  // not explicit: a parameter of this type accepts any callable
      : callable_(const_cast<void*>(static_cast<const void*>(&callable))),
        call_([](void* of, std::span<const PacketTrain> batch) {
          (*static_cast<std::remove_reference_t<Callable>*>(of))(batch);
        }) {}
  void operator()(std::span<const PacketTrain> batch) const { call_(callable_, batch); }

 private:
  void* callable_;
  void (*call_)(void*, std::span<const PacketTrain>);
};

// Calls `packet(bytes)` for each packet of a train.
template <class Packet>
void for_each_packet(const Datagrams::PacketTrain& train, const Packet& packet) {
  std::size_t offset = 0;
  do {
    packet(train.bytes.subspan(offset, std::min(train.packet_bytes, train.bytes.size() - offset)));
    offset += train.packet_bytes;
  } while (offset < train.bytes.size());
}

}  // namespace netfold::transport
