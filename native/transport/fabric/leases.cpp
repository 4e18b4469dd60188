// Registration leases and scratch memory of StreamMux.
#include <unistd.h>
#include <netfold/transport/fabric/stream_mux.hpp>

#include <algorithm>
#include <bit>
#include <utility>

namespace netfold::transport::fabric {

class StreamMux::MuxLease final : public Pipe::RegistrationLease {
 public:
  MuxLease(std::shared_ptr<StreamMux> mux, RegistrationCache::Lease* lease) : mux_(std::move(mux)), lease_(lease) {}
  ~MuxLease() override {
    if (mux_->pid_ != getpid()) return;  // a child of fork: the registration belongs to its parent
    std::lock_guard lock(mux_->mutex_);
    mux_->cache_.end_lease(lease_);
  }
  MuxLease(const MuxLease&) = delete;
  MuxLease& operator=(const MuxLease&) = delete;
  std::uint32_t hits() const override {
    std::lock_guard lock(mux_->mutex_);
    return lease_->hits;
  }
  std::uint32_t misses() const override {
    std::lock_guard lock(mux_->mutex_);
    return lease_->misses;
  }

 private:
  std::shared_ptr<StreamMux> mux_;
  RegistrationCache::Lease* lease_;
};

std::unique_ptr<Pipe::RegistrationLease> StreamMux::lease(std::byte* data, std::size_t bytes,
                                                          RegistrationCache::Lifetime lifetime) {
  std::lock_guard lock(mutex_);
  return std::make_unique<MuxLease>(shared_from_this(), cache_.add_lease(data, bytes, lifetime));
}

// Returns its block to the mux, which unmaps the longest unused blocks beyond kScratchBytes.
class StreamMux::MuxScratch final : public Pipe::Scratch {
 public:
  MuxScratch(std::shared_ptr<StreamMux> mux, ScratchBlock block) : mux_(std::move(mux)), block_(std::move(block)) {}
  ~MuxScratch() override {
    std::lock_guard lock(mux_->mutex_);
    auto& unused = mux_->scratch_;
    unused.push_back(std::move(block_));
    std::size_t bytes = 0;
    for (const auto& block : unused) bytes += block.memory.bytes();
    for (; bytes > kScratchBytes; unused.erase(unused.begin())) {
      bytes -= unused.front().memory.bytes();
      mux_->cache_.end_lease(unused.front().lease);
    }
  }
  MuxScratch(const MuxScratch&) = delete;
  MuxScratch& operator=(const MuxScratch&) = delete;
  std::byte* data() const override { return block_.memory.data(); }

 private:
  std::shared_ptr<StreamMux> mux_;
  ScratchBlock block_;
};

std::unique_ptr<Pipe::Scratch> StreamMux::scratch(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  bytes = std::bit_ceil(bytes);
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
  return std::make_unique<MuxScratch>(shared_from_this(), std::move(block));
}

}  // namespace netfold::transport::fabric
