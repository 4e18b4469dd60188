// The pipes to all other ranks of a group. Each is made when it is first used, so that a rank of a large group has
// memory and loops only for the ranks that it communicates with.
#pragma once

#include <netfold/transport/pipe_maker.hpp>
#include <netfold/transport/tcp/resumable_socket.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace netfold::transport {

class Mesh {
 public:
  using Io = Pipe::Io;

  // `pipes[r]` leads to rank r, null where `maker` shall make the pipe; pipes[rank] is null. Takes ownership.
  Mesh(int rank, std::vector<std::unique_ptr<Pipe>> pipes, std::unique_ptr<PipeMaker> maker);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pipes_.size()); }
  // Whether there is a pipe to `peer`: none to this rank, and none to any rank after close().
  bool leads_to(int peer) const { return peer != rank_ && !closed_; }

  // As Pipe's; false where there is no pipe.
  bool was_connected(int peer) const { return is_made(peer) && pipe(peer).was_connected(); }
  bool shows_bytes(int peer) const { return is_made(peer) && pipe(peer).shows_bytes(); }

  // Replaces each pipe by what `wrap` makes of it, now or once it is made. Before the first use.
  void wrap(std::function<std::unique_ptr<Pipe>(int peer, std::unique_ptr<Pipe>)> wrap);

  // As Pipe's functions; `peer` is another rank.
  Io send(int peer, std::span<const iovec> pieces) { return used(peer).send(pieces); }
  Io send_last(int peer, std::span<const iovec> pieces) { return used(peer).send_last(pieces); }
  Io receive(int peer, std::span<const iovec> pieces) {
    if (!ahead_[static_cast<std::size_t>(peer)].empty()) [[unlikely]]
      return receive_ahead(peer, pieces);
    return pipe(peer).receive(pieces);
  }
  Io receive(int peer, std::byte* into, std::size_t bytes);
  // The next bytes from a peer, `most` at most, as far as they have come. They stay there for `receive`.
  std::span<const std::byte> peek(int peer, std::size_t most);
  // Adds the descriptors that wake a thread for bytes to peek, unless some are there or the peer has closed.
  void wait_to_peek(int peer, std::vector<pollfd>& fds) const;
  void wait_for(int peer, short events, std::vector<pollfd>& fds) const { pipe(peer).wait_for(events, fds); }
  bool hung_up(int peer) const { return pipe(peer).hung_up(); }
  std::size_t unconfirmed(int peer) const { return is_made(peer) ? pipe(peer).unconfirmed() : 0; }

  // As PipeMaker's functions.
  bool prefers_large_chunks() const { return maker_->prefers_large_chunks(); }
  bool needs_progress() const { return maker_->needs_progress(); }
  Pipe::RegistrationLease lease(std::byte* data, std::size_t bytes) { return maker_->lease(data, bytes); }
  void take_readable(std::vector<int>& peers) { maker_->take_readable(peers); }
  void wait_for_readable(std::vector<pollfd>& fds) { maker_->wait_for_readable(fds); }

  bool uses_rma(int peer, std::size_t bytes) const { return maker_->may_use_rma() && pipe(peer).uses_rma(bytes); }
  bool post_receive(int peer, std::uint64_t name, std::byte* into, std::size_t bytes, Pipe::GpuMemory* gpu = nullptr) {
    return pipe(peer).post_receive(name, into, bytes, gpu);
  }
  Io receive_into_gpu(int peer, std::span<std::byte> gpu, std::span<const iovec> pieces) {
    return pipe(peer).receive_into_gpu(gpu, pieces);
  }
  std::size_t gpu_part_bytes(int peer) const { return pipe(peer).gpu_part_bytes(); }
  bool is_posted(int peer, std::uint64_t name) { return pipe(peer).is_posted(name); }
  Io put(int peer, std::span<const iovec> pieces, std::uint64_t name, Pipe::GpuMemory* gpu = nullptr) {
    return pipe(peer).put(pieces, name, gpu);
  }
  std::size_t bytes_in_flight(int peer) const { return is_made(peer) ? pipe(peer).bytes_in_flight() : 0; }
  Pipe::Scratch scratch(int peer, std::size_t bytes) { return pipe(peer).scratch(bytes); }
  // The functions from here on concern the pipes that were made.
  static constexpr std::int64_t kCancelNs = 100'000'000;
  // Takes back posted memory and parts in flight of all pipes. Blocks up to `most_ns`, then closes by force.
  void cancel(std::int64_t most_ns = kCancelNs);

  // A TCP connection under a pipe; null where there is none of this number, or after close().
  ResumableSocket* rail(int peer, int number);
  // The ranks to which there are pipes, in no order.
  std::vector<int> made() const;
  // Flushes all pipes: true once everything is sent, or where nothing can be done now.
  bool flush();
  // Adds the descriptors that wake a thread which can continue `flush`. Cost: that of the pipes used since they were last
  // flushed, not of all pipes.
  void wait_to_flush(std::vector<pollfd>& fds);
  // As Pipe's, of any pipe.
  bool has_unsent();

  // The place in the stream where sending to a peer stopped: it decides what may be sent next.
  enum class StreamPosition : std::uint8_t { between_messages, between_chunks, inside };
  void set_stream_position(int peer, StreamPosition position) { positions_[static_cast<std::size_t>(peer)] = position; }
  StreamPosition stream_position(int peer) const { return positions_[static_cast<std::size_t>(peer)]; }
  // Ends every pipe; peers see an orderly close after all sent bytes.
  void close();

 private:
  bool is_made(int peer) const { return pipes_[static_cast<std::size_t>(peer)] != nullptr; }
  // Makes the pipe where that is due.
  Pipe& pipe(int peer) const {
    if (!is_made(peer)) add(peer, new_pipe(peer));
    return *pipes_[static_cast<std::size_t>(peer)];
  }
  std::unique_ptr<Pipe> new_pipe(int peer) const;
  void add(int peer, std::unique_ptr<Pipe> pipe) const;
  // The same, for a use that may leave something to flush.
  Pipe& used(int peer) const;
  Io receive_ahead(int peer, std::span<const iovec> pieces);

  int rank_;
  std::unique_ptr<PipeMaker> maker_;
  std::function<std::unique_ptr<Pipe>(int, std::unique_ptr<Pipe>)> wrap_;
  bool closed_ = false;
  mutable std::vector<std::unique_ptr<Pipe>> pipes_;
  mutable std::vector<Pipe*> made_;
  mutable std::vector<int> unflushed_;  // ranks whose pipes may have something to flush
  mutable std::vector<bool> is_unflushed_;
  std::vector<StreamPosition> positions_;
  std::vector<std::vector<std::byte>> ahead_;  // by rank: bytes that `peek` took from the pipe
  std::vector<bool> has_closed_;               // by rank: as `peek` found
};

}  // namespace netfold::transport
