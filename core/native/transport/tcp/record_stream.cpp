#include <sys/socket.h>
#include <netfold/transport/socket.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <atomic>
#include <cerrno>

namespace netfold::transport {
namespace {

std::atomic<std::uint64_t> forged_total{0};

}  // namespace

RecordStream::RecordStream(const auth::StreamSecrets& secrets)
    : protector_(secrets.security, secrets.send),
      unprotector_(secrets.security, secrets.receive),
      out_(std::make_unique_for_overwrite<std::byte[]>(auth::kMaxRecordPayload + auth::kRecordOverhead)),
      in_(std::make_unique_for_overwrite<std::byte[]>(kReadBytes)) {}

std::uint64_t RecordStream::forged_records() { return forged_total.load(std::memory_order_relaxed); }

std::size_t RecordStream::take(IovecCursor& payload) {
  IovecCursor::Parts parts;
  payload.take(parts, auth::kMaxRecordPayload);
  pending_ = protector_.protect(parts.span(), out_.get());
  written_ = 0;
  record_bytes_ += pending_;
  return parts.bytes;
}

void RecordStream::note_record_end(std::uint64_t position) { record_ends_.push_back({record_bytes_, position}); }

bool RecordStream::flush(int fd, int& error) {
  while (written_ < pending_) {
    const ssize_t sent = ::send(fd, out_.get() + written_, pending_ - written_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && !is_temporary(errno)) error = errno;
    if (sent <= 0) return false;
    written_ += static_cast<std::size_t>(sent);
  }
  return true;
}

std::uint64_t RecordStream::confirmed(std::size_t unconfirmed, std::uint64_t from) {
  const std::uint64_t sent = record_bytes_ - pending_bytes();
  const std::uint64_t arrived = sent - std::min<std::uint64_t>(sent, unconfirmed);
  while (!record_ends_.empty() && record_ends_.front().record_bytes <= arrived) {
    confirmed_ = record_ends_.front().position;
    record_ends_.pop_front();
  }
  return std::max(from, confirmed_);
}

std::size_t RecordStream::next_record() const {
  if (raw_end_ - raw_ < auth::kRecordHeaderBytes) return 0;
  const std::size_t payload = auth::RecordUnprotector::payload_bytes(in_.get() + raw_);
  const std::size_t bytes = payload + auth::kRecordOverhead;
  // `open_next` treats a length that no record can have as a wrong tag.
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

RecordStream::ReadResult RecordStream::receive(int fd, std::span<const iovec> buffers, bool& accepted) {
  ReadResult result;
  IovecCursor into(buffers);
  for (;;) {
    const std::size_t copied = into.copy_from(in_.get() + payload_, payload_end_ - payload_);
    payload_ += copied;
    result.bytes += copied;
    // A call without buffers asks for the empty record only.
    if (into.at_end() && (payload_ < payload_end_ || !buffers.empty() || accepted)) return result;
    if (forged_) {
      if (result.bytes == 0) result.end = End::forged;
      return result;
    }
    if (open_next(accepted) || forged_) continue;
    // Make space for a whole record behind the bytes that are here.
    if (raw_ == raw_end_) {
      raw_ = raw_end_ = payload_ = payload_end_ = 0;
    } else if (kReadBytes - raw_ < auth::kMaxRecordPayload + auth::kRecordOverhead) {
      std::memmove(in_.get(), in_.get() + raw_, raw_end_ - raw_);
      raw_end_ -= raw_;
      raw_ = payload_ = payload_end_ = 0;
    }
    const ssize_t read = ::recv(fd, in_.get() + raw_end_, kReadBytes - raw_end_, MSG_DONTWAIT);
    if (read > 0) {
      raw_end_ += static_cast<std::size_t>(read);
      continue;
    }
    if (result.bytes > 0) return result;
    if (read == 0) {
      result.end = End::closed;
    } else if (!is_temporary(errno)) {
      result.end = End::failed;
      result.error = errno;
    }
    return result;
  }
}

}  // namespace netfold::transport
