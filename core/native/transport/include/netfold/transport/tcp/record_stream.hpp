// The record layer of one TCP connection (netfold/auth/records.hpp), between ResumableSocket and the socket.
//
// The record layer never blocks and does not own the socket. A connection has one key a direction, so a socket that
// reconnects needs a new RecordStream. Sent payload counts as taken once a record holds a copy of it. Where the socket
// accepts part of a record, `flush` writes the rest. Received bytes are read ahead, up to kReadBytes. The reader gets
// payload only from records whose tag is right.
#pragma once

#include <netfold/auth/records.hpp>
#include <netfold/transport/iovec_cursor.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

namespace netfold::transport {

class RecordStream {
 public:
  // Throws std::runtime_error where libcrypto is missing.
  explicit RecordStream(const auth::StreamSecrets& secrets);

  // Makes a record of the next bytes of `payload`, an empty record where there are none; returns their number.
  // Precondition: !has_pending().
  std::size_t take(IovecCursor& payload);
  // Notes where in the caller's stream the last record's payload ends; for `confirmed`.
  void note_record_end(std::uint64_t position);
  // Whether a record was not written to the socket, or only in part.
  bool has_pending() const { return written_ < pending_; }
  std::size_t pending_bytes() const { return pending_ - written_; }
  // Writes the pending bytes; true once none is left. Sets `error` to an errno other than EAGAIN and EINTR.
  bool flush(int fd, int& error);
  // The position in the caller's stream up to which the peer's kernel has whole records, at least `from`.
  // unconfirmed: how many of the last bytes written to the socket the peer's kernel has not confirmed.
  std::uint64_t confirmed(std::size_t unconfirmed, std::uint64_t from);

  enum class End : std::uint8_t { none, closed, failed, forged };
  struct ReadResult {
    std::size_t bytes = 0;
    End end = End::none;  // other than `none` only with 0 bytes
    int error = 0;        // errno of `failed`
  };
  // Copies all verified bytes that are here into `buffers`, as far as they go. An empty record sets `accepted`.
  ReadResult receive(int fd, std::span<const iovec> buffers, bool& accepted);
  // Whether bytes that were read ahead are ready, so that a reader need not wait for the socket.
  bool has_payload() const;

  // Records with a wrong tag that this process received.
  static std::uint64_t forged_records();

 private:
  static constexpr std::size_t kReadBytes = 4 * (auth::kMaxRecordPayload + auth::kRecordOverhead);

  // The bytes of the next record; 0 while the record is not here as a whole.
  std::size_t next_record() const;
  bool open_next(bool& accepted);

  auth::RecordProtector protector_;
  auth::RecordUnprotector unprotector_;

  std::unique_ptr<std::byte[]> out_;  // the last record made
  std::size_t pending_ = 0;           // its bytes
  std::size_t written_ = 0;           // of these, written to the socket
  std::uint64_t record_bytes_ = 0;    // of all records ever made
  struct RecordEnd {
    std::uint64_t record_bytes;  // record_bytes_ after this record
    std::uint64_t position;      // in the caller's stream
  };
  std::deque<RecordEnd> record_ends_;
  std::uint64_t confirmed_ = 0;

  std::unique_ptr<std::byte[]> in_;
  std::size_t payload_ = 0;  // unread payload of the verified record: [payload_, payload_end_)
  std::size_t payload_end_ = 0;
  std::size_t raw_ = 0;  // received bytes that are not verified yet: [raw_, raw_end_)
  std::size_t raw_end_ = 0;
  bool forged_ = false;
};

}  // namespace netfold::transport
