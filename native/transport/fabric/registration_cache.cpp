#include <netfold/transport/fabric/registration_cache.hpp>

#include <algorithm>

namespace netfold::transport::fabric {
namespace {

// Of the ranges in `map`, those that begin at or before `data`, the nearest first: the first that contains all.
template <class Map, class Wanted>
auto containing(Map& map, const std::byte* data, std::size_t bytes, Wanted wanted) {
  auto at = map.upper_bound({data, 0});
  while (at != map.begin()) {
    --at;
    if (at->first.contains(data, bytes) && wanted(at->second)) return at;
  }
  return map.end();
}

}  // namespace

void RegistrationCache::limit(const Limits& limits) {
  limits_ = limits;
  make_room(0);
}

RegistrationCache::Hold* RegistrationCache::hold(std::byte* data, std::size_t bytes, Term term) {
  return &holds_.emplace(Range{data, bytes}, Hold{.data = data, .bytes = bytes, .term = term})->second;
}

void RegistrationCache::end(Hold* hold) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto here = entry++;
    if (here->hold != hold) continue;
    here->hold = nullptr;
    if (here->leases == 0) drop(here);
  }
  const auto [first, last] = holds_.equal_range({hold->data, hold->bytes});
  holds_.erase(std::find_if(first, last, [&](const auto& each) { return &each.second == hold; }));
}

// One that goes with its last lease is not for others: whoever had that memory may have given it back.
RegistrationCache::Entries::iterator RegistrationCache::find(const std::byte* data, std::size_t bytes) {
  const auto found = containing(by_range_, data, bytes, [](const auto& entry) { return entry->hold != nullptr; });
  return found == by_range_.end() ? entries_.end() : found->second;
}

RegistrationCache::Hold* RegistrationCache::holder(const std::byte* data, std::size_t bytes, Term term) {
  const auto found =
      containing(holds_, data, bytes, [&](const Hold& hold) { return hold.term == term && keeps(hold); });
  return found == holds_.end() ? nullptr : &found->second;
}

RegistrationCache::Entry* RegistrationCache::lease(std::byte* data, std::size_t bytes) {
  Hold* passing = holder(data, bytes, Term::passing);
  // A tensor counts as one, where it is known what the tensor is.
  std::byte* first = passing != nullptr ? passing->data : data;
  const std::size_t wanted = passing != nullptr ? passing->bytes : bytes;
  auto entry = find(data, bytes);
  Hold* ours = passing == nullptr ? holder(data, bytes, Term::ours) : nullptr;
  if (ours == nullptr && (passing == nullptr || passing->hits + passing->misses == 0)) {
    const bool is_hit = entry != entries_.end();
    ++(is_hit ? counters_.hits : counters_.misses);
    if (passing != nullptr) ++(is_hit ? passing->hits : passing->misses);
  }
  if (entry == entries_.end()) {
    Hold* hold = holder(first, wanted, Term::lasting);
    if (hold == nullptr) hold = passing != nullptr ? passing : ours;
    if (hold != nullptr) {
      data = hold->data;
      bytes = hold->bytes;
    }
    make_room(bytes);
    entries_.push_back({.data = data, .bytes = bytes, .registration = nullptr, .hold = hold});
    entry = std::prev(entries_.end());
    try {
      entry->registration = wire_.register_memory(data, bytes, Access::writes);
    } catch (...) {
      entries_.pop_back();
      throw;
    }
    by_range_.emplace(Range{data, bytes}, entry);
    counters_.registered += bytes;
    counters_.bytes += bytes;
    ++counters_.entries;
    for (auto other = entries_.begin(); other != entry;) {
      const auto here = other++;
      const bool is_within = here->data >= data && here->data + here->bytes <= data + bytes;
      if (is_within && here->leases == 0) drop(here);
    }
  }
  entries_.splice(entries_.end(), entries_, entry);
  ++entry->leases;
  return &*entry;
}

void RegistrationCache::give_back(Entry* entry) {
  if (--entry->leases > 0 || entry->hold != nullptr) return;
  drop(std::find_if(entries_.begin(), entries_.end(), [&](const Entry& each) { return &each == entry; }));
}

void RegistrationCache::clear() {
  by_range_.clear();
  entries_.clear();
  counters_.entries = counters_.bytes = 0;
}

void RegistrationCache::abandon() {
  for (Entry& entry : entries_) static_cast<void>(entry.registration.release());
}

void RegistrationCache::drop(Entries::iterator entry) {
  const auto [first, last] = by_range_.equal_range({entry->data, entry->bytes});
  by_range_.erase(std::find_if(first, last, [&](const auto& each) { return each.second == entry; }));
  counters_.bytes -= entry->bytes;
  --counters_.entries;
  entries_.erase(entry);
}

// For so many bytes more.
void RegistrationCache::make_room(std::size_t bytes) {
  const auto is_full = [&] {
    return counters_.entries + (bytes > 0 ? 1 : 0) > limits_.entries || counters_.bytes + bytes > limits_.bytes;
  };
  for (auto entry = entries_.begin(); entry != entries_.end() && is_full();) {
    const auto here = entry++;
    const bool is_under_way = here->leases > 0 || (here->hold != nullptr && here->hold->term == Term::passing);
    if (is_under_way) continue;
    drop(here);
    ++counters_.evictions;
  }
}

}  // namespace netfold::transport::fabric
