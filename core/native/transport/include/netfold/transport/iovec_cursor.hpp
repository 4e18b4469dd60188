// A position in a list of buffers, for code that copies the buffers' bytes part by part.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

namespace netfold::transport {

class IovecCursor {
 public:
  explicit IovecCursor(std::span<const iovec> buffers) : buffers_(buffers) { skip_finished(); }

  bool at_end() const { return buffers_.empty(); }
  // The place of the next byte. Precondition: !at_end().
  const std::byte* front() const { return static_cast<const std::byte*>(buffers_.front().iov_base) + offset_; }

  // Passes over the next contiguous bytes, at most `limit`, and returns them. Precondition: !at_end().
  std::span<std::byte> next(std::size_t limit) {
    const iovec& buffer = buffers_.front();
    const std::span part{static_cast<std::byte*>(buffer.iov_base) + offset_, std::min(buffer.iov_len - offset_, limit)};
    offset_ += part.size();
    skip_finished();
    return part;
  }
  // Copies the next bytes to `to`, at most `limit`; returns their number.
  std::size_t copy_to(std::byte* to, std::size_t limit) {
    std::size_t copied = 0;
    while (!at_end() && copied < limit) {
      const auto part = next(limit - copied);
      std::memcpy(to + copied, part.data(), part.size());
      copied += part.size();
    }
    return copied;
  }
  // Copies `from` into the next bytes, at most `limit`; returns their number.
  std::size_t copy_from(const std::byte* from, std::size_t limit) {
    std::size_t copied = 0;
    while (!at_end() && copied < limit) {
      const auto part = next(limit - copied);
      std::memcpy(part.data(), from + copied, part.size());
      copied += part.size();
    }
    return copied;
  }

  // The next bytes without a copy: at most `limit`, and at most kMax buffers.
  struct Parts {
    static constexpr std::size_t kMax = 64;
    iovec buffers[kMax];
    std::size_t count = 0;
    std::size_t bytes = 0;
    std::span<const iovec> span() const { return {buffers, count}; }
  };
  void take(Parts& parts, std::size_t limit) {
    while (!at_end() && parts.count < Parts::kMax && parts.bytes < limit) {
      const auto part = next(limit - parts.bytes);
      parts.buffers[parts.count++] = {part.data(), part.size()};
      parts.bytes += part.size();
    }
  }

 private:
  void skip_finished() {
    while (!buffers_.empty() && offset_ == buffers_.front().iov_len) {
      buffers_ = buffers_.subspan(1);
      offset_ = 0;
    }
  }

  std::span<const iovec> buffers_;
  std::size_t offset_ = 0;  // in the first of them
};

}  // namespace netfold::transport
