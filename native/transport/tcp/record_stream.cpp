#include <sys/eventfd.h>
#include <sys/socket.h>
#include <netfold/transport/socket.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace netfold::transport {
namespace {

constexpr std::size_t kMaxPieces = 64;

std::atomic<std::uint64_t> forged_total{0};

bool is_wish_to_wait(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

RecordStream::RecordStream(const auth::StreamSecrets& secrets)
    : protector_(secrets.security, secrets.send),
      unprotector_(secrets.security, secrets.receive),
      out_(std::make_unique_for_overwrite<std::byte[]>(auth::kMaxRecordPayload + auth::kRecordOverhead)),
      in_(std::make_unique_for_overwrite<std::byte[]>(kReadBytes)) {}

std::uint64_t RecordStream::forged_records() { return forged_total.load(std::memory_order_relaxed); }

int RecordStream::always_readable() {
  static const int fd = ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw_errno("eventfd");
  return fd;
}

std::size_t RecordStream::take(std::span<const iovec> pieces, std::size_t skip) {
  iovec part[kMaxPieces];
  std::size_t count = 0;
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) {
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    if (count == kMaxPieces || bytes == auth::kMaxRecordPayload) break;
    const std::size_t some = std::min(piece.iov_len - skip, auth::kMaxRecordPayload - bytes);
    part[count++] = {static_cast<std::byte*>(piece.iov_base) + skip, some};
    bytes += some;
    skip = 0;
  }
  pending_ = protector_.protect({part, count}, out_.get());
  written_ = 0;
  sealed_bytes_ += pending_;
  return bytes;
}

void RecordStream::take_ends_at(std::uint64_t position) { sealed_.push_back({sealed_bytes_, position}); }

bool RecordStream::flush(int fd, int& error) {
  while (written_ < pending_) {
    const ssize_t sent = ::send(fd, out_.get() + written_, pending_ - written_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && !is_wish_to_wait(errno)) error = errno;
    if (sent <= 0) return false;
    written_ += static_cast<std::size_t>(sent);
  }
  return true;
}

std::uint64_t RecordStream::confirmed(std::size_t unconfirmed, std::uint64_t from) {
  const std::uint64_t sent = sealed_bytes_ - pending_bytes();
  const std::uint64_t arrived = sent - std::min<std::uint64_t>(sent, unconfirmed);
  while (!sealed_.empty() && sealed_.front().wire_end <= arrived) {
    confirmed_ = sealed_.front().position;
    sealed_.pop_front();
  }
  return std::max(from, confirmed_);
}

std::size_t RecordStream::next_record() const {
  if (raw_end_ - raw_ < auth::kRecordHeaderBytes) return 0;
  const std::size_t payload = auth::RecordUnprotector::payload_bytes(in_.get() + raw_);
  const std::size_t bytes = payload + auth::kRecordOverhead;
  // A length that no record has is as good as a wrong tag: `open_next` says so.
  return payload > auth::kMaxRecordPayload || raw_end_ - raw_ >= bytes ? bytes : 0;
}

bool RecordStream::has_payload() const { return payload_ < payload_end_ || next_record() != 0; }

bool RecordStream::open_next(bool& accepted) {
  const std::size_t bytes = next_record();
  if (bytes == 0) return false;
  if (bytes > auth::kMaxRecordPayload + auth::kRecordOverhead || !unprotector_.unprotect({in_.get() + raw_, bytes})) {
    forged_ = true;
    forged_total.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  payload_ = raw_ + auth::kRecordHeaderBytes;
  payload_end_ = payload_ + bytes - auth::kRecordOverhead;
  raw_ += bytes;
  if (payload_ == payload_end_) accepted = true;
  return true;
}

RecordStream::Got RecordStream::receive(int fd, std::span<const iovec> pieces, bool& accepted) {
  Got got;
  std::size_t piece = 0;
  std::size_t offset = 0;
  for (;;) {
    while (piece < pieces.size() && payload_ < payload_end_) {
      const std::size_t some = std::min(pieces[piece].iov_len - offset, payload_end_ - payload_);
      std::memcpy(static_cast<std::byte*>(pieces[piece].iov_base) + offset, in_.get() + payload_, some);
      payload_ += some;
      offset += some;
      got.bytes += some;
      if (offset == pieces[piece].iov_len) {
        ++piece;
        offset = 0;
      }
    }
    while (piece < pieces.size() && offset == pieces[piece].iov_len) {  // pieces without bytes
      ++piece;
      offset = 0;
    }
    if (piece == pieces.size() && payload_ < payload_end_) return got;
    const bool asks_for_greeting = pieces.empty() && !accepted;
    if (piece == pieces.size() && !asks_for_greeting) return got;
    if (forged_) {
      if (got.bytes == 0) got.end = End::forged;
      return got;
    }
    if (open_next(accepted) || forged_) continue;
    // Room for a whole record behind what is there.
    if (raw_ == raw_end_) {
      raw_ = raw_end_ = payload_ = payload_end_ = 0;
    } else if (kReadBytes - raw_ < auth::kMaxRecordPayload + auth::kRecordOverhead) {
      std::memmove(in_.get(), in_.get() + raw_, raw_end_ - raw_);
      raw_end_ -= raw_;
      raw_ = payload_ = payload_end_ = 0;
    }
    const ssize_t some = ::recv(fd, in_.get() + raw_end_, kReadBytes - raw_end_, MSG_DONTWAIT);
    if (some > 0) {
      raw_end_ += static_cast<std::size_t>(some);
      continue;
    }
    if (got.bytes > 0) return got;
    if (some == 0) {
      got.end = End::closed;
    } else if (!is_wish_to_wait(errno)) {
      got.end = End::failed;
      got.error = errno;
    }
    return got;
  }
}

}  // namespace netfold::transport
