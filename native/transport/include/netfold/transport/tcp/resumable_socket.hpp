// One connection of a pipe: a byte stream that outlives the socket it goes over.
//
// Both ends count the bytes that passed. The sender keeps a copy of what the peer's kernel has not confirmed; when the
// socket breaks, a new one is made above this layer, each end says how far it had received, and the other says the rest
// again. So a reader sees every byte once and in order, or an error; never a gap.
//
// What a kernel confirms counts only once the process behind it has taken the socket over: each end says so by one byte
// before all others. Else what was sent into a socket that the peer then gave up unread would be gone.
//
//   up        --error or end of stream, disconnect()-->  broken    the socket is closed; what it still held has been read
//   up        --begin_disconnect()-->                    disconnecting  nothing is sent; what the peer had sent is still read
//   disconnecting  --end_disconnect(), or the peer's end-->   broken
//   broken    --reconnect()-->                           up
//   broken    --give_up()-->                           lost      sends and receives say so, after what came before is read
//
// A rail that keeps nothing (both ends on one machine, where only a dying process breaks a connection) goes from up to
// lost at once. The copy costs one pass over what is sent; it is bounded by what the socket accepts unconfirmed.
//
// A rail with secrets sends and receives records (record_stream.hpp). The copy is above the records: a new socket has
// secrets of its own, and what the peer lacks is sealed again under them. The byte that says that a socket was taken
// over is an empty record then. A record with a wrong tag ends the rail for good, with that reason.
#pragma once

#include <netfold/transport/pipe.hpp>
#include <netfold/transport/socket.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

namespace netfold::transport {

class ResumableSocket {
 public:
  // Takes ownership of a connected stream socket. `secrets`: of this connection; security none for plain bytes.
  ResumableSocket(Fd socket, bool resumable, const auth::StreamSecrets& secrets);

  // As Pipe's. On a broken rail: later.
  Pipe::Io send(std::span<const iovec> pieces);
  Pipe::Io receive(std::span<const iovec> pieces);
  void wait_for(short events, std::vector<pollfd>& fds) const;
  // Whether the peer has ended this stream, for good. Notices an end that nobody reads towards.
  bool hung_up();
  std::size_t unconfirmed() const;

  bool is_broken() const { return state_ == State::broken; }
  // How often it was mended: both ends count alike, so that what is said of one socket is not taken for the next.
  int reconnects() const { return reconnects_; }
  // Bytes received in all, those included that nobody has read yet.
  std::uint64_t received() const { return received_; }
  // Gives up the socket of a rail that is up, in steps, so that who drives need not wait: the peer has given it up too,
  // or will, and what the peer had sent is to be read before. Between the steps, while drain() says false, wait for
  // duplicate_socket() to become readable, up to kLastNs.
  void begin_disconnect();
  bool is_disconnecting() const { return state_ == State::disconnecting; }
  bool drain();  // true: nothing more can come
  Fd duplicate_socket() const;
  void end_disconnect();
  static constexpr std::int64_t kLastNs = 200'000'000;
  // Goes on over `socket` from where the peer stands. False, and lost, where what it misses is not kept any more.
  // `secrets`: of the new connection, as secure as the first.
  bool reconnect(Fd socket, std::uint64_t peer_received, const auth::StreamSecrets& secrets);
  // No new connection will come. `why` is what errors say of it.
  void give_up(std::string why);
  // Says again what the former socket took along. True once that is done, or cannot be now.
  bool flush();
  // Whether bytes that were taken from the caller would be lost if we closed now.
  bool has_unsent() const { return state_ == State::up && records_ != nullptr && records_->has_pending(); }

 private:
  enum class State : std::uint8_t { up, disconnecting, broken, lost };
  static constexpr std::size_t kBlockBytes = 64 << 10;

  Pipe::Io lost() const { return {.closed = true, .error = error_, .why = &why_}; }
  Pipe::Io broke(int error);
  void disconnect();  // all steps at once, where the connection has ended
  void adopt(Fd socket, const auth::StreamSecrets& secrets);
  Pipe::Io send_records(std::span<const iovec> pieces);
  Pipe::Io receive_records(std::span<const iovec> pieces);
  void resend_as_record();
  bool drain_records();
  Pipe::Io ended(const RecordStream::Got& got);
  void buffer_for_retransmit(std::span<const iovec> pieces, std::size_t skip, std::size_t bytes);
  void release_confirmed();
  bool accepted();
  std::byte* buffered_at(std::uint64_t position, std::size_t* left);

  ProcessFd socket_;
  std::unique_ptr<RecordStream> records_;  // of this socket; null for plain bytes
  const bool resumable_;
  const auth::Security security_;
  State state_ = State::up;
  int error_ = 0;
  int reconnects_ = 0;
  bool accepted_ = true;  // the peer has taken this socket over
  std::string why_;

  std::uint64_t received_ = 0;
  std::vector<std::byte> unread_;  // came over a socket that is gone
  std::size_t unread_from_ = 0;

  std::uint64_t sent_ = 0;     // taken from the caller
  std::uint64_t written_ = 0;  // of these, handed to the present socket or its records, or known to have arrived
  std::uint64_t buffered_from_ = 0;
  std::deque<std::unique_ptr<std::byte[]>> retransmit_buffer_;  // [buffered_from_, sent_), in whole blocks
};

}  // namespace netfold::transport
