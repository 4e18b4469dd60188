// A byte stream to every other rank of a group.
//
// The connections are made and authenticated above this floor and handed down as descriptors. Nothing here
// blocks and nothing knows what the bytes mean.
#pragma once

#include <sys/uio.h>
#include <netfold/transport/socket.hpp>

#include <cstddef>
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
  // Whether a message to `peer` is half sent: then nothing else can be said on that connection.
  void set_in_message(int peer, bool value) { in_message_[static_cast<std::size_t>(peer)] = value; }
  bool in_message(int peer) const { return in_message_[static_cast<std::size_t>(peer)]; }
  // Ends every connection; peers see an orderly close after what was sent.
  void close();

 private:
  int rank_;
  std::vector<Fd> peers_;
  std::vector<bool> in_message_;
};

}  // namespace netfold::transport
