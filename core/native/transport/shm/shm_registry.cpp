#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <netfold/transport/process_wide.hpp>
#include <netfold/transport/shm/shm_registry.hpp>

#include <algorithm>

namespace netfold::transport {

ShmRegistry& ShmRegistry::instance() { return process_wide<ShmRegistry, &ShmRegistry::mutex_>(); }

[[maybe_unused]] static const auto& made_at_load = ShmRegistry::instance();

void ShmRegistry::add(std::byte* address, std::size_t bytes, Fd fd) {
  auto region = std::make_shared<ShmRegion>();
  region->address = address;
  region->bytes = bytes;
  region->fd = std::move(fd);
  std::lock_guard lock(mutex_);
  region->id = next_id_++;
  if (regions_.contains(address)) ++removals_;
  regions_[address] = std::move(region);
}

void ShmRegistry::remove(const std::byte* address) {
  std::lock_guard lock(mutex_);
  removals_ += regions_.erase(address);
}

std::shared_ptr<const ShmRegion> ShmRegistry::find(const std::byte* address, std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const auto& region = std::prev(after)->second;
  const auto offset = static_cast<std::size_t>(address - region->address);
  return offset + bytes <= region->bytes ? region : nullptr;
}

std::uint64_t ShmRegistry::removals() const {
  std::lock_guard lock(mutex_);
  return removals_;
}

bool ShmRegistry::holds(std::uint64_t id) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(regions_, [&](const auto& entry) { return entry.second->id == id; });
}

ShmBuffer::ShmBuffer(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  Fd fd(memfd_create("netfold-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("make shared memory");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("size shared memory");
  // Seal the size: no process can take pages away from a reader.
  fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  memory_ = Mapping::shared(fd.get(), bytes);
  if (!memory_) throw_errno("map shared memory");
  memory_.advise_huge_pages();
  ShmRegistry::instance().add(data(), bytes, std::move(fd));
}

}  // namespace netfold::transport
