// Registration leases and scratch memory of StreamMux.
#include <unistd.h>
#include <netfold/transport/fabric/stream_mux.hpp>

#include <algorithm>
#include <bit>
#include <utility>

namespace netfold::transport::fabric {

Pipe::RegistrationLease StreamMux::lease(std::byte* data, std::size_t bytes, RegistrationCache::Lifetime lifetime) {
  RegistrationCache::Lease* made = locked([&] { return cache_.add_lease(data, bytes, lifetime); });
  const auto end = [mux = shared_from_this()](RegistrationCache::Lease* lease) {
    if (mux->pid_ != getpid()) return;  // a child of fork: the registration belongs to its parent
    mux->locked([&] { mux->cache_.end_lease(lease); });
  };
  const std::shared_ptr<RegistrationCache::Lease> held(made, end);
  return {held, &held->uses};
}

Pipe::Scratch StreamMux::scratch(std::size_t bytes) {
  ScratchBlock block = locked([&] { return take_scratch(std::bit_ceil(bytes)); });
  std::byte* const data = block.memory.data();
  return {data, [mux = shared_from_this(), block = std::move(block)](std::byte*) mutable {
            mux->locked([&] { mux->keep_scratch(std::move(block)); });
          }};
}

StreamMux::ScratchBlock StreamMux::take_scratch(std::size_t bytes) {
  const auto fits = [&](const ScratchBlock& block) { return block.memory.bytes() == bytes; };
  const auto found = std::find_if(scratch_.rbegin(), scratch_.rend(), fits);
  ScratchBlock block;
  if (found != scratch_.rend()) {
    block = std::move(*found);
    scratch_.erase(std::next(found).base());
  } else {
    block.memory = Mapping::anonymous(bytes);
    if (!block.memory) throw Error("no memory for a fabric's scratch: " + std::to_string(bytes) + " bytes");
    block.lease = cache_.add_lease(block.memory.data(), bytes, RegistrationCache::Lifetime::internal);
  }
  return block;
}

// Unmaps the longest unused blocks beyond kScratchBytes.
void StreamMux::keep_scratch(ScratchBlock block) {
  scratch_.push_back(std::move(block));
  std::size_t bytes = 0;
  for (const auto& unused : scratch_) bytes += unused.memory.bytes();
  for (; bytes > kScratchBytes; scratch_.erase(scratch_.begin())) {
    bytes -= scratch_.front().memory.bytes();
    cache_.end_lease(scratch_.front().lease);
  }
}

}  // namespace netfold::transport::fabric
