// The status segment: what this process's groups are doing, for `netfold doctor job` and `netfold top`.
//
// Each process has one segment of anonymous memory. A reader finds the segment by its name among the process's
// descriptors (/proc/PID/fd), so the process need not answer: it may hang. The segment ends with the process, and the
// rights to read the process's descriptors are the rights to read the segment. Each group has an entry, which its
// driver alone writes. Reader: netfold/diagnostics/status_segment.py.
#pragma once

#include <netfold/collective/call.hpp>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace netfold::engine {

// The total duration of an activity, in one word that a reader of another process can read without a lock.
//
// Stopped: 2 * total ns. Running: 2 * (total ns - time of the start) + 1, to which a reader adds the time of reading.
// Writers need a lock.
class Stopwatch {
 public:
  void start(std::int64_t now) { word_.store((ns() - now) * 2 + 1, std::memory_order_relaxed); }
  void stop(std::int64_t now) { word_.store((ns() + now) * 2, std::memory_order_relaxed); }

 private:
  std::int64_t ns() const { return word_.load(std::memory_order_relaxed) >> 1; }
  std::atomic<std::int64_t> word_;
};

// Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share. Append fields at the end only.
struct StatusEntry {
  static constexpr int kMaxAwaited = 16;
  std::atomic<std::uint32_t> version;  // odd during a write
  std::uint32_t in_use;
  std::uint64_t group;  // as in event records
  std::int32_t rank;
  std::int32_t size;
  char job[40];  // the same on all ranks of a group, and different from every other group's
  std::int64_t joined_ns;
  // The oldest collective under way.
  std::uint32_t sequence;  // 0: none
  std::uint8_t kind;
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::uint8_t algorithm;
  std::uint64_t bytes;
  std::int64_t queued_ns;
  std::int64_t deadline_ns;           // -1: none
  std::uint32_t waiting;              // collectives under way and queued, the oldest included
  std::uint32_t awaited_count;        // ranks, as of the driver's last sleep
  std::int32_t awaited[kMaxAwaited];  // the first kMaxAwaited of them
  // The newest collective that is done.
  std::uint32_t done_sequence;  // 0: none
  std::uint8_t done_kind;
  std::uint8_t failed;
  std::uint8_t without_switch;  // the group joined a switch, which is lost
  std::uint8_t with_switch;     // the group joined a switch
  std::int64_t done_ns;
  char failure[512];  // why the group failed
  // Call sites of the two collectives; empty: not known.
  char site[160];
  char done_site[160];
  std::uint32_t transfers;  // sends and receives under way
  // The oldest of them.
  std::int32_t transfer_peer;  // -1: any
  std::int32_t transfer_tag;
  std::uint8_t transfer_kind;
  std::uint8_t transfer_reserved[3];
  std::uint64_t transfer_bytes;
  std::int64_t transfer_ns;  // submitted at
  char transfer_site[160];
  // Sums over all operations that are done, sends and receives included.
  std::uint64_t operations;
  std::uint64_t tensor_bytes;
  std::uint64_t wire_bytes;
  std::uint64_t retransmissions;
  std::uint64_t judged;  // collectives whose slowest rank is known: the switch names it
  std::uint64_t last;    // those of them whose slowest rank is this rank
  // Written by submitting and waiting threads too, under the lock of the group's inbox instead of `version`.
  Stopwatch under_way;  // operations exist, queued ones included
  Stopwatch inside;     // a caller's thread waits for an operation, or drives
};

class StatusSegment {
 public:
  static constexpr int kCapacity = 256;  // groups; further groups have no entry
  static StatusSegment& instance();
  // An entry for a group; nullptr: all are in use, or the segment could not be created.
  StatusEntry* open();
  void close(StatusEntry* entry);

 private:
  struct Layout {
    char magic[8];
    std::uint32_t layout;
    std::uint32_t capacity;
    std::uint32_t entry_bytes;
    std::int32_t pid;
    std::uint64_t reserved;
    StatusEntry entries[kCapacity];
  };
  void make();

  std::mutex mutex_;
  Layout* layout_ = nullptr;
  int pid_ = 0;
};

// Writes an entry; writes nothing without one. A writer (W) and a reader (R, StatusRead) of this process:
//
//   W1 version becomes odd, relaxed        R1 version, acquire
//   W2 release fence                       R2 the fields
//   W3 the fields                          R3 acquire fence
//   W4 version becomes even, release       R4 version again, relaxed; the copy is valid if it equals R1's and is even
//
// R1 pairs with W4: a reader of an even version sees everything written before. R3 pairs with W2: a reader that saw any
// store of a later W3 sees at least that write's odd version in R4, and discards its copy. Without W2 a processor such
// as aarch64 may show W3 before W1. The fields are no atomics: the reader discards a copy made during a write unused.
class StatusWrite {
 public:
  explicit StatusWrite(StatusEntry* entry) : entry_(entry) {
    if (entry_ == nullptr) return;
    entry_->version.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // W2
  }
  ~StatusWrite() {
    if (entry_ != nullptr) entry_->version.fetch_add(1, std::memory_order_release);
  }
  StatusWrite(const StatusWrite&) = delete;
  StatusWrite& operator=(const StatusWrite&) = delete;
  StatusEntry* operator->() { return entry_; }
  explicit operator bool() const { return entry_ != nullptr; }
  // Copy a text, cut to fit; nullptr is copied as "".
  template <std::size_t Size>
  static void put(char (&to)[Size], const char* text) {
    put(to, Size, text);
  }

 private:
  static void put(char* to, std::size_t capacity, const char* text);
  StatusEntry* entry_;
};

// Reads an entry of this process, from any thread. False: there is no entry.
struct StatusRead {
  static bool copy(const StatusEntry* entry, StatusEntry& into);
};

}  // namespace netfold::engine
