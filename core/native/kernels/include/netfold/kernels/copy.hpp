// Copies that bypass the caches, for data too long to be found there again.
//
// A plain store reads the cache line that it is about to overwrite, and evicts another line for it: three bytes of
// memory traffic for each byte copied. A streaming store does neither.
#pragma once

#include <cstddef>

namespace netfold::kernels {

// An operation that writes so many bytes has evicted its first bytes from the caches by its end. Measured (two
// processes at once, 2 MB of L2 each): equal at 16 to 32 MB; at 64 MB streaming stores take 0.65 to 0.75 of the time.
// Not for data that was just read: its lines are in the cache, and would be lost.
inline constexpr std::size_t kBeyondCaches = 32 << 20;

// Copies as memcpy does, or not at all where `to` is `from`. `streams`: with stores that bypass the caches.
void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool streams);

}  // namespace netfold::kernels
