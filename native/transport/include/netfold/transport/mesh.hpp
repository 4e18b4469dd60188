// A byte stream to every other rank of a group.
//
// The connections are made and authenticated above this floor and handed down as descriptors. Nothing here
// blocks and nothing knows what the bytes mean.
#pragma once

#include <sys/uio.h>
#include <netfold/transport/socket.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace netfold::transport {

class Mesh {
 public:
  // `peers[r]` is a connected stream socket to rank r; peers[rank] is empty. Takes ownership.
  Mesh(int rank, std::vector<Fd> peers);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  int fd(int peer) const { return peers_[static_cast<std::size_t>(peer)].get(); }

  struct Io {
    std::size_t bytes = 0;
    bool closed = false;  // the peer closed, or the connection broke
    int error = 0;        // errno of a broken connection, 0 for an orderly close
  };
  // As many bytes as go now; 0 bytes and not closed means: later.
  Io send(int peer, std::span<const iovec> pieces);
  Io receive(int peer, std::byte* into, std::size_t bytes);
  Io receive(int peer, std::span<const iovec> pieces);
  // Whether the peer has closed its end; what it said before may still be unread.
  bool hung_up(int peer) const;
  // Where what is being said to a peer stands: what else can be said on that connection depends on it.
  enum class Place : std::uint8_t { between_messages, between_pieces, inside };
  void set_place(int peer, Place place) { places_[static_cast<std::size_t>(peer)] = place; }
  Place place(int peer) const { return places_[static_cast<std::size_t>(peer)]; }
  // Bytes said to this peer that its kernel has not confirmed: lost if we close and it still speaks.
  std::size_t unconfirmed(int peer) const;
  // Ends every connection; peers see an orderly close after what was sent.
  void close();

 private:
  int rank_;
  std::vector<Fd> peers_;
  std::vector<Place> places_;
};

}  // namespace netfold::transport
