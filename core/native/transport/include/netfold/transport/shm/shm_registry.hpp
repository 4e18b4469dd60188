// The table of this process's memory that other ranks of the node may map: addresses, and their descriptors.
//
// There is one table a process. An id is never used twice, so a peer with a mapping of a removed region cannot mistake
// another region for it. Thread-safe; one look-up a call.
#pragma once

#include <netfold/transport/mapping.hpp>
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
  // Registers the first `bytes` of a descriptor, which are mapped, shared, at `address`. Takes ownership of the
  // descriptor. Replaces an earlier region at this address.
  void add(std::byte* address, std::size_t bytes, Fd fd);
  void remove(const std::byte* address);
  // The region that holds all of [address, address + bytes), or nullptr.
  std::shared_ptr<const ShmRegion> find(const std::byte* address, std::size_t bytes) const;
  // The number of regions ever removed.
  std::uint64_t removals() const;
  bool holds(std::uint64_t id) const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::shared_ptr<const ShmRegion>> regions_;
  std::uint64_t next_id_ = 1;
  std::uint64_t removals_ = 0;
};

// Anonymous memory that other ranks of the node may map. It is in the registry while the object lives.
class ShmBuffer {
 public:
  // Zeroed. Throws std::system_error.
  explicit ShmBuffer(std::size_t bytes);
  ~ShmBuffer() { ShmRegistry::instance().remove(data()); }
  ShmBuffer(const ShmBuffer&) = delete;
  ShmBuffer& operator=(const ShmBuffer&) = delete;
  std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  Mapping memory_;
};

}  // namespace netfold::transport
