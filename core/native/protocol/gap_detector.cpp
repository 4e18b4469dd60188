#include <netfold/protocol/gap_detector.hpp>

#include <algorithm>
#include <limits>

namespace netfold::protocol {

GapDetector::Gap GapDetector::observe(std::uint64_t packet_number) {
  if (packet_number <= newest_) {
    const std::uint64_t age = newest_ - packet_number;
    if (age < 64) received_ |= std::uint64_t{1} << age;
    return {};
  }
  // This packet makes too old: the missing ones of the last kReorderThreshold, and all numbers that it skipped.
  const std::uint64_t ahead = packet_number - newest_;
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  for (std::uint64_t age = kReorderThreshold; age-- > 0;) {
    if (age + ahead < kReorderThreshold || (received_ >> age & 1) != 0) continue;
    last = newest_ - age;
    if (first == 0) first = last;
  }
  if (ahead > kReorderThreshold) {
    if (first == 0) first = newest_ + 1;
    last = packet_number - kReorderThreshold;
  }
  newest_ = packet_number;
  received_ = (ahead < 64 ? received_ << ahead : 0) | 1;
  if (first == 0) return {};
  const std::uint64_t count = last - first + 1;
  return {first, static_cast<std::uint32_t>(std::min<std::uint64_t>(count, std::numeric_limits<std::uint32_t>::max()))};
}

}  // namespace netfold::protocol
