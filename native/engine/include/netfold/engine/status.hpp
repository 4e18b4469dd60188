// What this process's groups are doing, for who looks from outside: `netfold doctor job`, `netfold top`.
//
// One page of anonymous memory a process, found by its name among the process's descriptors (/proc/PID/fd): nothing is
// left behind, whoever may read the process's descriptors may look, and a process that hangs need not answer. Each
// group has an entry; its driver alone writes it, under a count that is odd meanwhile. Of sends and receives it shows
// the oldest that is not done. Readers: netfold/diagnostics/status_segment.py.
#pragma once

#include <netfold/collective/call.hpp>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace netfold::engine {

// How long something went on in all, in one word, so that who reads it needs no lock: twice the nanoseconds, and one
// more while it goes on; from the nanoseconds the time of its start is then taken away, for the reader to add the time
// of reading. Writers need one.
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
  std::atomic<std::uint32_t> version;  // odd while it is being written
  std::uint32_t in_use;
  std::uint64_t group;  // the number that event records carry
  std::int32_t rank;
  std::int32_t size;
  char job[40];  // the same on all ranks of a group, and no other's
  std::int64_t joined_ns;
  // The oldest operation under way; `sequence` 0: none.
  std::uint32_t sequence;
  std::uint8_t kind;
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::uint8_t algorithm;
  std::uint64_t bytes;
  std::int64_t queued_ns;
  std::int64_t deadline_ns;  // -1: none
  std::uint32_t waiting;     // operations under way and queued, this one included
  std::uint32_t awaited_count;
  std::int32_t awaited[kMaxAwaited];  // ranks, as far as there is room; as of when it last lay down to wait
  // The newest operation that is done; 0: none yet.
  std::uint32_t done_sequence;
  std::uint8_t done_kind;
  std::uint8_t failed;
  std::uint8_t without_switch;  // it joined one, and that is lost
  std::uint8_t with_switch;     // it joined one, lost or not
  std::int64_t done_ns;
  char failure[512];  // of a group that failed
  // Where the two operations were called; empty where that is not known.
  char site[160];
  char done_site[160];
  // Sends and receives under way, and the oldest of them.
  std::uint32_t transfers;
  std::int32_t transfer_peer;  // -1: any
  std::int32_t transfer_tag;
  std::uint8_t transfer_kind;
  std::uint8_t transfer_reserved[3];
  std::uint64_t transfer_bytes;
  std::int64_t transfer_ns;  // since when
  char transfer_site[160];
  // Sums over all that is done, sends and receives included.
  std::uint64_t operations;
  std::uint64_t tensor_bytes;
  std::uint64_t wire_bytes;
  std::uint64_t retransmissions;
  std::uint64_t judged;  // collectives that told who came last: in the network, the switch does
  std::uint64_t last;    // and it was this rank
  // Written under the group's mutex, and not under `version`: by who submits and waits, too.
  Stopwatch under_way;  // while anything is, queued included
  Stopwatch inside;     // while a thread of the caller waits for an operation, or runs it
};

class StatusSegment {
 public:
  // Groups beyond this many are not shown.
  static constexpr int kCapacity = 256;
  static StatusSegment& instance();
  // An entry for a group, or nullptr where there is none left or the page could not be made.
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

// Writes an entry; nothing where there is none. A writer (W) and a reader (R, StatusRead) of this process:
//
//   W1 version becomes odd, relaxed        R1 version, acquire
//   W2 release fence                       R2 the fields
//   W3 the fields                          R3 acquire fence
//   W4 version becomes even, release       R4 version again, relaxed; taken where it equals R1's and is even
//
// R1 pairs with W4: who reads an even version sees all that was written before. R3 pairs with W2: a reader that saw any
// of a later W3 sees at least that write's odd version in R4, and throws its copy away. Without W2 a processor such as
// aarch64 may show W3 before W1. The fields are no atomics: what is read beside a write is thrown away unlooked at.
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
  static void put(char* to, std::size_t room, const char* text);  // nullptr: nothing

 private:
  StatusEntry* entry_;
};

// Reads an entry of this process from any thread. False where there is none.
struct StatusRead {
  static bool copy(const StatusEntry* entry, StatusEntry& into);
};

}  // namespace netfold::engine
