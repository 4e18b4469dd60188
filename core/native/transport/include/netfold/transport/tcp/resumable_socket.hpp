// One connection of a pipe: a byte stream that survives the loss of its socket.
//
// Both ends count the bytes that passed. The sender keeps a copy of all bytes that the peer's kernel has not confirmed.
// When the socket breaks, the layer above makes a new one. Each end then tells how many bytes it has received, and the
// other end sends the rest again. So a reader sees every byte once and in order, or an error, and never a gap.
//
// The confirmation of a kernel counts only once the process behind it has taken the socket over. Each end reports this
// by a *greeting*: one byte before all others. Otherwise bytes would be lost that were sent into a socket which the
// peer then closed unread.
//
//   state          event                                       becomes        action
//   broken         the start, where there is no socket yet     -              wait for reconnect()
//   up             error or end of stream                      broken         read what the socket holds; close it
//   up             begin_disconnect()                          disconnecting  send no more; still read the peer's bytes
//   disconnecting  end_disconnect(), or the peer's end         broken         read what the socket holds; close it
//   broken         reconnect()                                 up             send the missing bytes again
//   broken         give_up()                                   lost           fail, after all earlier bytes were read
//   any            a record with a wrong tag                   lost           fail with that reason
//
// A connection that is not resumable goes from up to lost at once and keeps no copy. It serves both ends on one
// machine, where only the death of a process breaks a connection. The copy costs one pass over the sent bytes; its size
// is bounded by what the socket accepts unconfirmed. Without a copy, it sends nothing before the greeting has come.
//
// A connection with secrets sends and receives records (record_stream.hpp). The copy holds plain bytes: a new socket
// has secrets of its own, and the missing bytes go into new records under them. The greeting is an empty record then.
#pragma once

#include <netfold/transport/pipe.hpp>
#include <netfold/transport/socket.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

namespace netfold::transport {

class ResumableSocket {
 public:
  // Takes ownership of a connected stream socket; empty: the layer above connects once this end is used (`reconnect`).
  // secrets: of this connection; without a socket only their `security` counts, which is none for plain bytes.
  ResumableSocket(Fd socket, bool resumable, const auth::StreamSecrets& secrets);

  // As Pipe's. On a broken connection: 0 bytes, not closed.
  Pipe::Io send(std::span<const iovec> pieces);
  Pipe::Io receive(std::span<const iovec> pieces);
  void wait_for(short events, std::vector<pollfd>& fds) const;
  // Whether the peer has ended this stream for good. Detects an end of stream that no `receive` would reach.
  bool hung_up();
  std::size_t unconfirmed() const;

  bool is_broken() const { return state_ == State::broken; }
  // Whether no connection has been made, nor given up.
  bool is_unused() const { return is_broken() && reconnects_ < 0; }
  // How many times this connection got a new socket; -1: it never had one. Both ends count alike, so a message about
  // one socket is not applied to the next.
  int reconnects() const { return reconnects_; }
  // Both ends agreed to close this socket since it is idle, so that its end is no break. Holds until the next socket.
  void set_released(bool is_released) { is_released_ = is_released && state_ == State::up; }
  bool is_released() const { return is_released_; }
  // When bytes last passed, where this end may disconnect without harm: the connection can be made again, and nothing
  // is under way on this side. Else -1.
  std::int64_t idle_since_ns();
  // Whether the peer's host has confirmed nothing for kSilentNs that this end has sent, repeatedly: bytes, or probes of
  // a full receiver. A host confirms probes also while the peer's process is stopped. Where this end has sent nothing,
  // the kernel's keepalive ends the socket after the same time.
  bool is_silent() const;
  static constexpr std::int64_t kSilentNs = 15'000'000'000;
  // -1: there is no socket.
  int descriptor() const { return socket_.get(); }
  // Whether bytes wait that came over a socket which is closed.
  bool has_unread() const { return unread_from_ < unread_.size(); }
  // Bytes ever received, unread ones included.
  std::uint64_t received() const { return received_; }

  // Gives up the socket of a connection that is up, in steps, so that the driving thread need not wait. The peer has
  // given up the socket too, or will; all bytes that the peer had sent are read before the socket is closed.
  // While drain() is false, wait until duplicate_socket() is readable, at most kLastNs; then end_disconnect().
  void begin_disconnect();
  bool is_disconnecting() const { return state_ == State::disconnecting; }
  // Reads what the socket holds. True once nothing more can come.
  bool drain();
  Fd duplicate_socket() const;
  void end_disconnect();
  static constexpr std::int64_t kLastNs = 200'000'000;

  // Continues over `socket`. False, and lost, where the retransmit buffer lacks bytes that the peer needs.
  // peer_received: how many bytes the peer has received.
  // secrets: of the new connection, with the same `security` as the first.
  bool reconnect(Fd socket, std::uint64_t peer_received, const auth::StreamSecrets& secrets);
  // No new connection will come; errors carry the reason `why`. is_orderly: the peer closed the group.
  void give_up(std::string why, bool is_orderly = false);
  // Sends again what the previous socket lost. True once all is sent, or while nothing can be sent.
  bool flush();
  // Whether closing now would lose bytes that were taken from the caller: they are pending here, or the greeting is
  // still to come. A socket that is closed with the greeting unread is reset, and drops the bytes that it has not sent.
  bool has_unsent() {
    return state_ == State::up && ((records_ != nullptr && records_->has_pending()) || (sent_ > 0 && !accepted()));
  }

 private:
  enum class State : std::uint8_t { up, disconnecting, broken, lost };
  static constexpr std::size_t kBlockBytes = 64 << 10;

  Pipe::Io lost() const { return {.closed = true, .error = error_, .why = &why_, .is_orderly = is_orderly_}; }
  Pipe::Io handle_error(int error);
  Pipe::Io handle_end(const RecordStream::ReadResult& result);
  void disconnect();
  void adopt(Fd socket, const auth::StreamSecrets& secrets);
  RecordStream::ReadResult read_socket(std::span<const iovec> buffers);
  Pipe::Io send_records(std::span<const iovec> pieces);
  void buffer_for_retransmit(IovecCursor bytes, std::size_t count);
  void release_confirmed();
  bool accepted();
  iovec buffered_at(std::uint64_t position) const;

  ProcessFd socket_;
  std::int64_t used_ns_ = 0;
  std::unique_ptr<RecordStream> records_;  // of this socket; null for plain bytes
  const bool resumable_;
  const auth::Security security_;
  State state_ = State::up;
  int error_ = 0;
  int reconnects_ = 0;
  bool is_released_ = false;
  bool accepted_ = true;  // the peer's greeting has come over this socket, or none is due
  std::string why_;
  bool is_orderly_ = false;

  std::uint64_t received_ = 0;
  std::vector<std::byte> unread_;  // received over a socket that is closed
  std::size_t unread_from_ = 0;

  std::uint64_t sent_ = 0;     // bytes taken from the caller
  std::uint64_t written_ = 0;  // of these, given to the present socket or its records, or known to have arrived
  std::uint64_t buffered_from_ = 0;
  std::deque<std::unique_ptr<std::byte[]>> retransmit_buffer_;  // bytes [buffered_from_, sent_), in whole blocks
};

}  // namespace netfold::transport
