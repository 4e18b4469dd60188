// The record layer of one TCP connection (netfold/auth/records.hpp): between the bytes of a rail and its socket.
//
// It never blocks and does not own the socket. It has one key a direction, so a rail that reconnects needs another one.
// Sent payload is copied into a record before it counts as taken; a record that the socket accepts in part is kept here
// and `flush` writes the rest. Received bytes are read ahead, up to kReadBytes; only payload of records whose tag is
// right is given to the reader.
#pragma once

#include <netfold/auth/records.hpp>
#include <netfold/transport/pipe.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

namespace netfold::transport {

class RecordStream {
 public:
  // Throws std::runtime_error where libcrypto is missing.
  explicit RecordStream(const auth::StreamSecrets& secrets);

  // Makes a record of the first bytes of `pieces`, behind the first `skip`; how many. An empty record without pieces.
  // Precondition: !has_pending().
  std::size_t take(std::span<const iovec> pieces, std::size_t skip);
  // The place in the rail's stream where the payload of the last record ends; for `confirmed`.
  void take_ends_at(std::uint64_t position);
  bool has_pending() const { return written_ < pending_; }
  std::size_t pending_bytes() const { return pending_ - written_; }
  // Writes what is pending; true once nothing is. An errno that is no wish to wait goes to `error`.
  bool flush(int fd, int& error);
  // The place up to which the peer's kernel has whole records, if it has all but the last `unconfirmed` bytes that were
  // written; at least `from`.
  std::uint64_t confirmed(std::size_t unconfirmed, std::uint64_t from);

  enum class End : std::uint8_t { none, closed, failed, forged };
  struct Got {
    std::size_t bytes = 0;
    End end = End::none;  // said only with 0 bytes
    int error = 0;
  };
  // As many verified bytes as there are. An empty record sets `greeted`.
  Got receive(int fd, std::span<const iovec> pieces, bool& accepted);
  // Whether a reader need not wait for the socket.
  bool has_payload() const;

  // Records with a wrong tag that this process was sent.
  static std::uint64_t forged_records();
  // A descriptor that is always readable: what wakes a reader of bytes that were read ahead.
  static int always_readable();

 private:
  static constexpr std::size_t kReadBytes = 4 * (auth::kMaxRecordPayload + auth::kRecordOverhead);

  // 0 while the next record has not come as a whole.
  std::size_t next_record() const;
  bool open_next(bool& accepted);

  auth::RecordProtector protector_;
  auth::RecordUnprotector unprotector_;

  std::unique_ptr<std::byte[]> out_;
  std::size_t pending_ = 0;
  std::size_t written_ = 0;
  std::uint64_t sealed_bytes_ = 0;  // of all records, on the wire
  struct Sealed {
    std::uint64_t wire_end;
    std::uint64_t position;
  };
  std::deque<Sealed> sealed_;
  std::uint64_t confirmed_ = 0;

  std::unique_ptr<std::byte[]> in_;
  std::size_t payload_ = 0;  // of the record that is open
  std::size_t payload_end_ = 0;
  std::size_t raw_ = 0;  // records that are not
  std::size_t raw_end_ = 0;
  bool forged_ = false;
};

}  // namespace netfold::transport
