#include <sys/mman.h>
#include <unistd.h>
#include <netfold/engine/status.hpp>
#include <netfold/transport/process_wide.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>

namespace netfold::engine {

StatusSegment& StatusSegment::instance() { return transport::process_wide<StatusSegment, &StatusSegment::mutex_>(); }

[[maybe_unused]] static const auto& made_at_load = StatusSegment::instance();

void StatusSegment::make() {
  pid_ = getpid();
  layout_ = nullptr;
  // The descriptor stays open on purpose: readers find the segment by it.
  const int fd = memfd_create("netfold-status", MFD_CLOEXEC);
  if (fd < 0) return;
  void* mapped = MAP_FAILED;
  if (ftruncate(fd, sizeof(Layout)) == 0) {
    mapped = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (mapped == MAP_FAILED) {
    ::close(fd);
    return;
  }
  layout_ = static_cast<Layout*>(mapped);
  layout_->layout = 2;
  layout_->capacity = kCapacity;
  layout_->entry_bytes = sizeof(StatusEntry);
  layout_->pid = pid_;
  std::memcpy(layout_->magic, "NFSTATUS", sizeof layout_->magic);
}

StatusEntry* StatusSegment::open() {
  std::lock_guard lock(mutex_);
  // A fork's child needs a segment of its own.
  if (pid_ != getpid()) make();
  if (layout_ == nullptr) return nullptr;
  auto* end = layout_->entries + kCapacity;
  auto* entry = std::find_if(layout_->entries, end, [](const StatusEntry& each) { return each.in_use == 0; });
  if (entry == end) return nullptr;
  StatusWrite write(entry);
  std::memset(&entry->in_use, 0, sizeof *entry - sizeof entry->version);
  entry->in_use = 1;
  return entry;
}

void StatusSegment::close(StatusEntry* entry) {
  std::lock_guard lock(mutex_);
  if (entry == nullptr || pid_ != getpid()) return;
  StatusWrite write(entry);
  entry->in_use = 0;
}

bool StatusRead::copy(const StatusEntry* entry, StatusEntry& into) {
  if (entry == nullptr) return false;
  for (;;) {
    const auto before = entry->version.load(std::memory_order_acquire);
    std::memcpy(&into.in_use, &entry->in_use, sizeof into - offsetof(StatusEntry, in_use));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && entry->version.load(std::memory_order_relaxed) == before) return true;
    std::this_thread::yield();
  }
}

void StatusWrite::put(char* to, std::size_t capacity, const char* text) {
  if (text == nullptr) text = "";
  const std::size_t bytes = strnlen(text, capacity - 1);
  std::memcpy(to, text, bytes);
  to[bytes] = '\0';
}

}  // namespace netfold::engine
