// Memory that mmap gave to this process; unmapped when the object ends.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace netfold::transport {

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  // Zeroed pages of this process alone. Empty on failure, with errno set.
  static Mapping anonymous(std::size_t bytes) { return map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1); }
  // The first `bytes` of a descriptor, shared with other processes. Empty on failure, with errno set.
  static Mapping shared(int fd, std::size_t bytes, int more_flags = 0) {
    return map(bytes, MAP_SHARED | more_flags, fd);
  }

  // Asks for huge pages, which fill few entries of the TLB. Where the machine gives none, nothing changes.
  void advise_huge_pages() const { madvise(data_, bytes_, MADV_HUGEPAGE); }

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  static Mapping map(std::size_t bytes, int flags, int fd) {
    Mapping made;
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (address == MAP_FAILED) return made;
    made.data_ = static_cast<std::byte*>(address);
    made.bytes_ = bytes;
    return made;
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace netfold::transport
