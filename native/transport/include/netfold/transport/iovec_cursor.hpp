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

  // Copies the next bytes to `to`, at most `limit`; returns their number.
  std::size_t copy_to(std::byte* to, std::size_t limit) {
    return advance(limit, [&](std::byte* part, std::size_t bytes) {
      std::memcpy(to, part, bytes);
      to += bytes;
      return true;
    });
  }
  // Copies `from` into the next bytes, at most `limit`; returns their number.
  std::size_t copy_from(const std::byte* from, std::size_t limit) {
    return advance(limit, [&](std::byte* part, std::size_t bytes) {
      std::memcpy(part, from, bytes);
      from += bytes;
      return true;
    });
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
    parts.count = 0;
    parts.bytes = advance(limit, [&](std::byte* part, std::size_t bytes) {
      parts.buffers[parts.count++] = {part, bytes};
      return parts.count < Parts::kMax;
    });
  }

 private:
  // Calls `visit(part, bytes)` for each contiguous part, until `limit` bytes or until `visit` returns false.
  template <class Visit>
  std::size_t advance(std::size_t limit, Visit visit) {
    std::size_t passed = 0;
    bool goes_on = true;
    while (goes_on && !at_end() && passed < limit) {
      const std::size_t bytes = std::min(buffers_.front().iov_len - offset_, limit - passed);
      goes_on = visit(static_cast<std::byte*>(buffers_.front().iov_base) + offset_, bytes);
      passed += bytes;
      offset_ += bytes;
      skip_finished();
    }
    return passed;
  }
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
