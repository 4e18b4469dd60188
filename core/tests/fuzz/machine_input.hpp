// A fuzzer's bytes as events for a machine: each begins with a byte that says which, packets are as long as a job's.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

namespace netfold::fuzz {

inline constexpr std::uint32_t kJob = 7, kEpoch = 3, kIncarnation = 0x5eed;
inline constexpr std::uint32_t kPayloadBytes = 16;
inline constexpr std::size_t kPacketBytes = protocol::kHeaderBytes + kPayloadBytes;

// A broken promise ends the process, so that the fuzzer keeps its input.
inline void expect(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }
  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const auto value = static_cast<std::uint8_t>(left_.front());
    left_ = left_.subspan(1);
    return value;
  }
  // Up to `bytes` of what is left, on the heap, so that a read past the end is seen.
  std::vector<std::byte> take(std::size_t bytes) {
    const auto taken = left_.first(std::min(bytes, left_.size()));
    left_ = left_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }
  // A packet of any length and content.
  std::vector<std::byte> any_packet() { return take(byte()); }
  static constexpr std::uint8_t kReservedFlag = 2;
  // One that belongs to the job, and may say anything else: else a fuzzer rarely gets past the first checks.
  std::vector<std::byte> job_packet(std::uint8_t flags) {
    // Rarely with the reserved flag, with which it is malformed.
    protocol::Header header{.flags = static_cast<std::uint8_t>(flags | (byte() == 0xff ? kReservedFlag : 0)),
                            .job = kJob,
                            .epoch = kEpoch,
                            .incarnation = kIncarnation};
    header.chunk = byte();
    header.operation = byte();
    header.elements = byte();
    header.worker = byte();
    header.count = byte();
    header.wire = byte();
    header.reduce = byte();
    std::vector<std::byte> packet(kPacketBytes);
    protocol::write_header(header, packet.data());
    const auto values = take(kPayloadBytes);
    std::copy(values.begin(), values.end(), packet.begin() + protocol::kHeaderBytes);
    return packet;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace netfold::fuzz
