// Copying what is long: past the caches, where nothing of it would be found again.
//
// A plain store reads the line that it is about to overwrite, and pushes something else out of the cache for it: three
// bytes of memory traffic for each byte copied. A streaming store does neither.
#pragma once

#include <cstddef>

namespace netfold::kernels {

// From so many bytes on that an operation writes, what it wrote first has left the caches by the end. Measured (two
// processes at it, 2 MB of L2 each): equal at 16 to 32 MB; at 64 MB streaming stores take 0.65 to 0.75 of the time. Not
// for what has just been read: its lines are there, and are lost.
inline constexpr std::size_t kBeyondCaches = 32 << 20;

// As memcpy; nothing where `to` is `from`. `streams`: by stores that go past the caches.
void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool streams);

}  // namespace netfold::kernels
