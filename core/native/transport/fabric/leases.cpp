// Registration leases and scratch memory of StreamMux.
#include <poll.h>
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

Pipe::GpuLease StreamMux::lease_gpu(std::byte* data, std::size_t bytes, const Memory& memory) {
  RegistrationCache::GpuEntry* made = locked([&] {
    const std::string why = grants_.gpu_obstacle();
    if (!why.empty()) throw Error(state_.provider() + " takes no memory of GPUs: " + why);
    if (state_.rails.empty()) throw Error("the endpoint of " + state_.provider() + " was closed");
    return cache_.add_gpu(data, bytes, memory);
  });
  return Pipe::GpuLease(made, [mux = shared_from_this()](RegistrationCache::GpuEntry* entry) {
    if (mux->pid_ != getpid()) return;  // a child of fork: the registration belongs to its parent
    mux->locked([&] { mux->cache_.end_gpu(entry); });
  });
}

std::shared_ptr<GpuFlush> StreamMux::flush(Pipe::GpuMemory& memory, std::byte* at) {
  std::lock_guard lock(mutex_);
  auto& entry = static_cast<RegistrationCache::GpuEntry&>(memory);
  if (entry.registration == nullptr) throw Error("the endpoint of " + state_.provider() + " was closed");
  if (at < entry.data || at >= entry.data + entry.bytes) {
    throw Error("a flush of an address that is not in the " + std::to_string(entry.bytes) +
                " bytes of a GPU's memory that were registered");
  }
  if (flush_registration_ == nullptr) {
    Endpoint& endpoint = *state_.rails.front();
    const auto name = endpoint.name();
    const std::string text(reinterpret_cast<const char*>(name.data()), name.size());
    const auto known = peers_.front().find(text);
    self_ =
        known != peers_.front().end() ? known->second : peers_.front().emplace(text, endpoint.add(name)).first->second;
    flush_memory_ = map_buffers(1);
    flush_registration_ = endpoint.register_memory(flush_memory_.data(), 1, Access::writes, Memory());
  }
  auto flush = std::make_shared<GpuFlush>();
  flush->entry = &entry;
  flush->of = {entry.registration->address(at), entry.registration->key()};
  flush->polled_ns = now_ns();
  ++entry.users;
  flushes_.push_back(flush);
  return flush;
}

bool StreamMux::is_flushed(GpuFlush& flush) {
  std::lock_guard lock(mutex_);
  if (!flush.is_begun && flush.entry != nullptr) {
    Endpoint& endpoint = *state_.rails.front();
    const auto taken =
        endpoint.read(self_, flush_memory_.data(), 1, flush_registration_->descriptor(), flush.of, &flush);
    flush.is_begun = taken == Endpoint::Taken::yes;
    if (taken == Endpoint::Taken::never) finish_flush(flush, "reading memory of a GPU was refused: " + endpoint.why());
  }
  progress_flush(flush);
  if (!flush.failure.empty()) throw Error(flush.failure);
  return flush.entry == nullptr;
}

void StreamMux::end_flush(GpuFlush& flush) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (!flush.is_begun && flush.entry != nullptr) finish_flush(flush, "");
      progress_flush(flush);
      if (flush.entry == nullptr) return;
    }
    ::poll(nullptr, 0, 1);
  }
}

void StreamMux::progress_flush(GpuFlush& flush) {
  if (flush.entry != nullptr) progress();
  if (flush.entry == nullptr) return;
  // A process that is stopped polls nothing, and the read may be complete.
  const std::int64_t now = now_ns();
  flush.waited_ns += std::min(now - std::exchange(flush.polled_ns, now), kReadNs / 100);
  if (flush.waited_ns < kReadNs) return;
  close_endpoint("reading memory of a GPU was not complete after " + std::to_string(kReadNs / 1'000'000'000) + " s");
}

void StreamMux::finish_flush(GpuFlush& flush, const std::string& failure) {
  if (!failure.empty()) flush.failure = state_.provider() + ": " + failure;
  cache_.release(std::exchange(flush.entry, nullptr));
  flushes_.remove_if([&](const auto& each) { return each.get() == &flush; });
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
