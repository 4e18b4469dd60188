// The pipes to all other ranks of a group.
#pragma once

#include <netfold/transport/tcp/resumable_socket.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace netfold::transport {

class Mesh {
 public:
  using Io = Pipe::Io;

  // `pipes[r]` leads to rank r; pipes[rank] is null. Takes ownership.
  Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pipes_.size()); }
  // Whether there is a pipe to `peer`: none to this rank, and none to any rank after close().
  bool leads_to(int peer) const { return pipes_[static_cast<std::size_t>(peer)] != nullptr; }

  // As Pipe's; false where there is no pipe.
  bool was_connected(int peer) const { return leads_to(peer) && pipe(peer).was_connected(); }

  // Replaces the pipe to `peer` by `other` and returns the old pipe.
  std::unique_ptr<Pipe> exchange(int peer, std::unique_ptr<Pipe> other) {
    return std::exchange(pipes_[static_cast<std::size_t>(peer)], std::move(other));
  }

  // As Pipe's functions; `peer` is another rank.
  Io send(int peer, std::span<const iovec> pieces) { return pipe(peer).send(pieces); }
  Io receive(int peer, std::span<const iovec> pieces) { return pipe(peer).receive(pieces); }
  Io receive(int peer, std::byte* into, std::size_t bytes);
  void wait_for(int peer, short events, std::vector<pollfd>& fds) const { pipe(peer).wait_for(events, fds); }
  bool hung_up(int peer) const { return pipe(peer).hung_up(); }
  std::size_t unconfirmed(int peer) const { return leads_to(peer) ? pipe(peer).unconfirmed() : 0; }

  // The same for all pipes of a mesh.
  bool prefers_large_chunks() const;
  bool uses_rma(int peer, std::size_t bytes) const { return leads_to(peer) && pipe(peer).uses_rma(bytes); }
  bool post_receive(int peer, std::uint64_t name, std::byte* into, std::size_t bytes) {
    return pipe(peer).post_receive(name, into, bytes);
  }
  bool is_posted(int peer, std::uint64_t name) { return pipe(peer).is_posted(name); }
  Io put(int peer, std::span<const iovec> pieces, std::uint64_t name) { return pipe(peer).put(pieces, name); }
  std::size_t bytes_in_flight(int peer) const { return leads_to(peer) ? pipe(peer).bytes_in_flight() : 0; }
  // Serves parts to and from every peer.
  Pipe::RegistrationLease lease(std::byte* data, std::size_t bytes);
  Pipe::Scratch scratch(int peer, std::size_t bytes) { return pipe(peer).scratch(bytes); }
  // Takes back posted memory and parts in flight of all pipes. Blocks up to kCancelNs, then closes by force.
  void cancel();

  // A TCP connection under a pipe; null where there is none of this number, or after close().
  ResumableSocket* rail(int peer, int number);
  // Flushes all pipes: true once everything is sent, or where nothing can be done now.
  bool flush();
  // Adds the descriptors that wake a thread which can continue `flush`.
  void wait_to_flush(std::vector<pollfd>& fds);
  // As Pipe's, of any pipe.
  bool needs_progress() const;
  bool has_unsent();

  static constexpr std::int64_t kCancelNs = 100'000'000;

  // The place in the stream where sending to a peer stopped: it decides what may be sent next.
  enum class StreamPosition : std::uint8_t { between_messages, between_chunks, inside };
  void set_stream_position(int peer, StreamPosition position) { positions_[static_cast<std::size_t>(peer)] = position; }
  StreamPosition stream_position(int peer) const { return positions_[static_cast<std::size_t>(peer)]; }
  // Ends every pipe; peers see an orderly close after all sent bytes.
  void close();

 private:
  Pipe& pipe(int peer) const { return *pipes_[static_cast<std::size_t>(peer)]; }
  // Whether `test` holds for a pipe.
  template <class Test>
  bool any(Test test) const {
    for (const auto& pipe : pipes_) {
      if (pipe != nullptr && test(*pipe)) return true;
    }
    return false;
  }

  int rank_;
  std::vector<std::unique_ptr<Pipe>> pipes_;
  std::vector<StreamPosition> positions_;
};

}  // namespace netfold::transport
