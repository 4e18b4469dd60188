// A doubly linked list of a vector's entries, by index. An entry has the members `previous` and `next`.
#pragma once

#include <cstdint>
#include <vector>

namespace netfold::protocol {

struct IndexList {
  static constexpr std::uint32_t kNone = 0xffffffff;
  std::uint32_t head = kNone;
  std::uint32_t tail = kNone;
  std::uint32_t count = 0;

  bool operator==(const IndexList&) const = default;

  template <class Entry>
  void push_back(std::vector<Entry>& entries, std::uint32_t index) {
    entries[index].previous = tail;
    entries[index].next = kNone;
    (tail != kNone ? entries[tail].next : head) = index;
    tail = index;
    ++count;
  }
  template <class Entry>
  void unlink(std::vector<Entry>& entries, std::uint32_t index) {
    Entry& entry = entries[index];
    (entry.previous != kNone ? entries[entry.previous].next : head) = entry.next;
    (entry.next != kNone ? entries[entry.next].previous : tail) = entry.previous;
    entry.previous = entry.next = kNone;
    --count;
  }
};

}  // namespace netfold::protocol
