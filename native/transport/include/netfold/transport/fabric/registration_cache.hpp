// What is registered with one wire for writes, and how long: so that memory which is used again need not be registered
// again, which costs a fabric as much as sending some hundred kilobytes.
//
// The classic registration cache keeps what it once saw, and must guess when an address was freed and means other pages
// now: by hooks in malloc, or by asking the kernel. A wrong guess is a wrong result. Here nothing is guessed. Memory is
// *held* for a time by who knows that it stays mapped as it is: by its owner, who says when that ends (a *persistent*
// hold: the job's own buckets), or by an operation, which borrowed it from its caller (a *operation's* one). A registration
// is of the whole range of a hold, and ends with it at the latest. What nobody holds is registered for one use.
//
//   acquire(range): within what is registered -> that         hit
//                 within a hold             -> all of it    miss
//                 else                      -> the range    miss, and it ends with the lease
//
// Containment is a hit; so a bucket is registered once, whatever parts of it are reduced. A passing hold counts once,
// at its first lease: a tensor that goes in many pieces is one hit or one miss. A registration within a longer one that
// is made goes, unless it is in use.
//
// BOUNDS. Of entries and of bytes, by who was used last; what operations under way use stays, so they may pass the
// bound. A lasting hold of more than all the bytes is registered by the operation, and no longer. No bytes at all:
// nothing is kept beyond an operation.
//
// Not thread-safe: its port takes turns.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

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
    std::uint64_t entries = 0;     // now
    std::uint64_t bytes = 0;       // now
  };
  enum class Lifetime : std::uint8_t {
    operation,
    persistent,
    internal
  };  // internal: a persistent one that nobody counts

  // Memory that somebody says will stay as it is.
  struct Lease {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Lifetime lifetime = Lifetime::operation;
    std::uint32_t hits = 0;  // of a passing one: 1 of these once it was used
    std::uint32_t misses = 0;
  };
  struct Entry {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::unique_ptr<Registration> registration;
    const Lease* lease = nullptr;  // nobody's: of one lease
    std::uint32_t users = 0;
  };

  // `wire` outlives this, or `clear` comes before its end.
  explicit RegistrationCache(Endpoint& endpoint) : endpoint_(endpoint) {}

  void limit(const Limits& limits);
  Lease* add_lease(std::byte* data, std::size_t bytes, Lifetime lifetime);
  // With its registration, or once the last lease of that ends.
  void end_lease(Lease* lease);
  // Throws Error.
  Entry* acquire(std::byte* data, std::size_t bytes);
  void release(Entry* entry);
  // All registrations, whoever uses them.
  void clear();
  // In a child of fork: they are its parent's to end.
  void abandon();
  const Counters& counters() const { return counters_; }

 private:
  // By first address, then the longest first.
  struct Range {
    const std::byte* data;
    std::size_t bytes;
    bool operator<(const Range& other) const { return data != other.data ? data < other.data : bytes > other.bytes; }
    bool contains(const std::byte* first, std::size_t count) const {
      return first >= data && first + count <= data + bytes;
    }
  };
  using Entries = std::list<Entry>;  // who was used last is last

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
  std::multimap<Range, Entries::iterator> by_range_;
  Counters counters_;
};

}  // namespace netfold::transport::fabric
