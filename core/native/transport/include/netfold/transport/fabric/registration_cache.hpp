// The cache of one endpoint's memory registrations for RMA. A registration costs a fabric as much as sending some
// hundred kilobytes, so memory that is used again is not registered again.
//
// The classic registration cache keeps every registration, and must guess when an address was freed and maps other
// pages
// now: by hooks in malloc, or by asking the kernel. A wrong guess gives a wrong result. This cache guesses nothing. A
// *lease* of memory promises that the memory stays mapped as it is until the lease ends. The owner of the memory takes
// a lease (*persistent*: the job's own buckets), or an operation that borrowed the memory from its caller
// (*operation*), or the mux for its scratch memory (*internal*). A registration covers the whole range of a lease, and
// ends with the lease at the latest. Memory without a lease is registered for one use.
//
//   acquire(range)                      registers                            counts as
//   within a registration of a lease    nothing                              a hit
//   within a lease                      the whole range of the lease         a miss
//   else                                the range, until its last release    a miss
//
// Containment is a hit; so a bucket is registered once, whichever parts of it are reduced. A lease of an operation
// counts
// once, at its first use: a tensor that is sent in many parts is one hit or one miss. An internal lease is not counted.
// A new registration replaces those within its range that are not in use.
//
// Bounds. Limits on entries and bytes; the least recently used entries go first. Entries of operations in progress
// stay, so they may exceed the limits. A persistent lease of more than Limits::bytes is registered by the operation
// instead, and no longer than the operation. Limits::bytes 0: nothing is kept beyond an operation.
//
// Memory of GPUs is never found by its address. It is registered when its owner takes a lease, and used with that lease;
// the limits do not concern it. A registration in use ends at its last release.
//
// Not thread-safe: StreamMux holds its lock.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>
#include <netfold/transport/pipe.hpp>

#include <list>
#include <map>

namespace netfold::transport::fabric {

class RegistrationCache {
 public:
  struct Limits {
    std::size_t entries = 1024;
    std::size_t bytes = std::size_t{4} << 30;
  };
  struct Counters {
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
    std::uint64_t evictions = 0;
    std::uint64_t registered = 0;  // bytes, in all
    std::uint64_t entries = 0;     // at present
    std::uint64_t bytes = 0;       // at present
  };
  enum class Lifetime : std::uint8_t { operation, persistent, internal };

  struct Lease {
    Lease(std::byte* from, std::size_t count, Lifetime of) : data(from), bytes(count), lifetime(of) {}
    std::byte* data;
    std::size_t bytes;
    Lifetime lifetime;
    Pipe::RegistrationUses uses;  // of an `operation` lease: one of these is 1 once it was used
  };
  struct Entry {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::unique_ptr<Registration> registration;
    const Lease* lease = nullptr;  // null: the entry ends with its last user
    std::uint32_t users = 0;
    bool is_gpu = false;
  };
  // The lease of memory of a GPU. Without a registration once the endpoint was closed.
  struct GpuEntry : Entry, Pipe::GpuMemory {
    bool is_leased = true;
  };

  // `endpoint` outlives the cache, or `clear` comes before its end.
  explicit RegistrationCache(Endpoint& endpoint) : endpoint_(endpoint) {}

  void limit(const Limits& limits);
  Lease* add_lease(std::byte* data, std::size_t bytes, Lifetime lifetime);
  // Ends the lease and its registration; a registration in use ends at its last release.
  void end_lease(Lease* lease);
  // Throws Error where the provider cannot register the memory.
  Entry* acquire(std::byte* data, std::size_t bytes);
  void release(Entry* entry);
  // Registers memory of a GPU. Throws Error where the provider refuses.
  GpuEntry* add_gpu(std::byte* data, std::size_t bytes, const Memory& memory);
  void end_gpu(GpuEntry* entry);
  // Ends all registrations, those in use too.
  void clear();
  // In a child of fork: leaves all registrations to the parent.
  void abandon();
  const Counters& counters() const { return counters_; }

 private:
  // Ordered by first address, then the longest first.
  struct Range {
    const std::byte* data;
    std::size_t bytes;
    bool operator<(const Range& other) const { return data != other.data ? data < other.data : bytes > other.bytes; }
    bool contains(const std::byte* first, std::size_t count) const {
      return first >= data && first + count <= data + bytes;
    }
  };
  using Entries = std::list<Entry>;  // the most recently used last

  Entries::iterator find(const std::byte* data, std::size_t bytes);
  Lease* find_lease(const std::byte* data, std::size_t bytes, Lifetime lifetime);
  bool keeps(const Lease& lease) const {
    return lease.lifetime != Lifetime::persistent || lease.bytes <= limits_.bytes;
  }
  void drop(Entries::iterator entry);
  void make_room(std::size_t bytes);

  Endpoint& endpoint_;
  Limits limits_;
  std::multimap<Range, Lease> leases_;
  Entries entries_;
  std::list<GpuEntry> gpus_;
  std::multimap<Range, Entries::iterator> by_range_;
  Counters counters_;
};

}  // namespace netfold::transport::fabric
