#include <netfold/transport/fabric/registration_cache.hpp>

#include <algorithm>
#include <tuple>
#include <utility>

namespace netfold::transport::fabric {
namespace {

// The first range in `map` that contains the bytes and whose value is wanted; the nearest start below `data` first.
template <class Map, class IsWanted>
auto containing(Map& map, const std::byte* data, std::size_t bytes, IsWanted is_wanted) {
  auto at = map.upper_bound({data, 0});
  while (at != map.begin()) {
    --at;
    if (at->first.contains(data, bytes) && is_wanted(at->second)) return at;
  }
  return map.end();
}

}  // namespace

void RegistrationCache::limit(const Limits& limits) {
  limits_ = limits;
  make_room(0);
}

RegistrationCache::Lease* RegistrationCache::add_lease(std::byte* data, std::size_t bytes, Lifetime lifetime) {
  const auto made = leases_.emplace(std::piecewise_construct, std::forward_as_tuple(Range{data, bytes}),
                                    std::forward_as_tuple(data, bytes, lifetime));
  return &made->second;
}

void RegistrationCache::end_lease(Lease* lease) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto current = entry++;
    if (current->lease != lease) continue;
    current->lease = nullptr;
    if (current->users == 0) drop(current);
  }
  const auto [first, last] = leases_.equal_range({lease->data, lease->bytes});
  leases_.erase(std::find_if(first, last, [&](const auto& each) { return &each.second == lease; }));
}

// Entries without a lease serve only their first user: the memory may have been freed since.
RegistrationCache::Entries::iterator RegistrationCache::find(const std::byte* data, std::size_t bytes) {
  const auto found = containing(by_range_, data, bytes, [](const auto& entry) { return entry->lease != nullptr; });
  return found == by_range_.end() ? entries_.end() : found->second;
}

RegistrationCache::Lease* RegistrationCache::find_lease(const std::byte* data, std::size_t bytes, Lifetime lifetime) {
  const auto found =
      containing(leases_, data, bytes, [&](const Lease& lease) { return lease.lifetime == lifetime && keeps(lease); });
  return found == leases_.end() ? nullptr : &found->second;
}

RegistrationCache::Entry* RegistrationCache::acquire(std::byte* data, std::size_t bytes) {
  Lease* operation = find_lease(data, bytes, Lifetime::operation);
  // With an operation's lease, the whole tensor counts as one use.
  std::byte* first = operation != nullptr ? operation->data : data;
  const std::size_t wanted = operation != nullptr ? operation->bytes : bytes;
  auto entry = find(data, bytes);
  Lease* internal = operation == nullptr ? find_lease(data, bytes, Lifetime::internal) : nullptr;
  if (internal == nullptr && (operation == nullptr || operation->uses.hits + operation->uses.misses == 0)) {
    const bool is_hit = entry != entries_.end();
    ++(is_hit ? counters_.hits : counters_.misses);
    if (operation != nullptr) ++(is_hit ? operation->uses.hits : operation->uses.misses);
  }
  if (entry == entries_.end()) {
    Lease* lease = find_lease(first, wanted, Lifetime::persistent);
    if (lease == nullptr) lease = operation != nullptr ? operation : internal;
    if (lease != nullptr) {
      data = lease->data;
      bytes = lease->bytes;
    }
    make_room(bytes);
    entries_.push_back({.data = data, .bytes = bytes, .registration = nullptr, .lease = lease});
    entry = std::prev(entries_.end());
    try {
      entry->registration = endpoint_.register_memory(data, bytes, Access::writes, Memory());
    } catch (...) {
      entries_.pop_back();
      throw;
    }
    by_range_.emplace(Range{data, bytes}, entry);
    counters_.registered += bytes;
    counters_.bytes += bytes;
    ++counters_.entries;
    for (auto other = entries_.begin(); other != entry;) {
      const auto current = other++;
      if (Range{data, bytes}.contains(current->data, current->bytes) && current->users == 0) drop(current);
    }
  }
  entries_.splice(entries_.end(), entries_, entry);
  ++entry->users;
  return &*entry;
}

void RegistrationCache::release(Entry* entry) {
  if (--entry->users > 0 || entry->lease != nullptr) return;
  if (entry->is_gpu) {
    gpus_.remove_if([&](const GpuEntry& each) { return &each == entry && !each.is_leased; });
    return;
  }
  drop(std::find_if(entries_.begin(), entries_.end(), [&](const Entry& each) { return &each == entry; }));
}

RegistrationCache::GpuEntry* RegistrationCache::add_gpu(std::byte* data, std::size_t bytes, const Memory& memory) {
  auto registration = endpoint_.register_memory(data, bytes, Access::writes, memory);
  GpuEntry& entry = gpus_.emplace_back();
  entry.data = data;
  entry.bytes = bytes;
  entry.registration = std::move(registration);
  entry.is_gpu = true;
  return &entry;
}

void RegistrationCache::end_gpu(GpuEntry* entry) {
  entry->is_leased = false;
  if (entry->users == 0) gpus_.remove_if([&](const GpuEntry& each) { return &each == entry; });
}

void RegistrationCache::clear() {
  by_range_.clear();
  entries_.clear();
  gpus_.remove_if([](const GpuEntry& each) { return !each.is_leased; });
  for (GpuEntry& entry : gpus_) {
    entry.registration.reset();
    entry.users = 0;
  }
  counters_.entries = counters_.bytes = 0;
}

void RegistrationCache::abandon() {
  for (Entry& entry : entries_) static_cast<void>(entry.registration.release());
  for (GpuEntry& entry : gpus_) static_cast<void>(entry.registration.release());
}

void RegistrationCache::drop(Entries::iterator entry) {
  const auto [first, last] = by_range_.equal_range({entry->data, entry->bytes});
  by_range_.erase(std::find_if(first, last, [&](const auto& each) { return each.second == entry; }));
  counters_.bytes -= entry->bytes;
  --counters_.entries;
  entries_.erase(entry);
}

// Evicts entries until `bytes` more bytes fit.
void RegistrationCache::make_room(std::size_t bytes) {
  const auto is_full = [&] {
    return counters_.entries + (bytes > 0 ? 1 : 0) > limits_.entries || counters_.bytes + bytes > limits_.bytes;
  };
  for (auto entry = entries_.begin(); entry != entries_.end() && is_full();) {
    const auto current = entry++;
    const bool is_in_use =
        current->users > 0 || (current->lease != nullptr && current->lease->lifetime == Lifetime::operation);
    if (is_in_use) continue;
    drop(current);
    ++counters_.evictions;
  }
}

}  // namespace netfold::transport::fabric
