// Memory of this process that other ranks of the node may map: which addresses stand on which descriptor.
//
// One table a process. An id is never used twice, so a peer that still holds a mapping of what is gone cannot take
// something else for it. Thread-safe; looked up once a call.
#pragma once

#include <netfold/transport/socket.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace netfold::transport {

struct ShmRegion {
  std::uint64_t id = 0;
  std::byte* address = nullptr;
  std::size_t bytes = 0;  // from the start of the descriptor's memory
  Fd fd;
};

class ShmRegistry {
 public:
  static ShmRegistry& instance();
  // The descriptor's first `bytes` are mapped, shared, at `address`. Takes ownership. Replaces what stood there.
  void add(std::byte* address, std::size_t bytes, Fd fd);
  void remove(const std::byte* address);
  // The region that holds all of [address, address + bytes), or nullptr.
  std::shared_ptr<const ShmRegion> find(const std::byte* address, std::size_t bytes) const;
  // Changes whenever a region goes.
  std::uint64_t removals() const;
  bool holds(std::uint64_t id) const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::shared_ptr<const ShmRegion>> regions_;
  std::uint64_t next_id_ = 1;
  std::uint64_t removals_ = 0;
};

// Anonymous memory that other ranks of the node may map; in the table for as long as it lives.
class ShmBuffer {
 public:
  // Zeroes. Throws std::system_error.
  explicit ShmBuffer(std::size_t bytes);
  ~ShmBuffer();
  ShmBuffer(const ShmBuffer&) = delete;
  ShmBuffer& operator=(const ShmBuffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace netfold::transport
