// The wire format of aggregation: one fixed header, and values behind it.
//
// Requests (contributions) and answers (results) have one layout and one length, so a switch can write the answer where
// the request stood. The header is big-endian, every field is naturally aligned, and values start at byte 48: a P4
// parser or an XDP program finds each field at a constant offset. Values are little-endian, as on the hosts that add
// them. All packets of a job have the same length: the tail chunk of an operation is zero-padded.
//
//   offset bytes field
//        0     2 magic          0x4e46 ("NF")
//        2     1 version        1
//        3     1 flags          bit 0 from_switch, bit 1 reserved (0), bit 2 mismatch, bit 3 hello, bit 4 NACK
//        4     4 job            given by the switch at admission
//        8     4 epoch          given by the switch when the job's workers are complete; always growing
//       12     4 incarnation    drawn by the switch when it starts
//       16     8 chunk          full sequence number within the epoch; never wraps (NACK: see below)
//       24     8 packet_number  packets sent so far by this sender in this epoch; never repeats among packets of a kind
//       32     4 operation      the group's operation sequence number
//       36     4 elements       low 32 bits of the operation's element count, or a digest of its blocks' sizes; a check
//                               of the call, and text for errors
//       40     2 worker         sender's bit index; in an answer: the worker whose contribution came last
//       42     2 count          values with a meaning; the rest is zero padding
//       44     1 wire           DType of the values on the wire
//       45     1 reduce         ReduceOp
//       46     2 table          low 16 bits of the hash of the group's choice table and of the called function
//       48       values         payload_bytes of the job
//
// In an authenticated job a MAC of 16 bytes follows, over all bytes before it. The machines do not know it: the owner
// of the keys checks the MAC and removes it first.
//
// A NACK tells a worker (`worker`) that packets of its own did not come: the packet numbers `chunk` to
// `chunk` + `elements` - 1. It carries no values: `count` is 0, as in no other answer.
//
// A packet is first a PacketView (bytes whose length, magic and version were checked) and only then a Header.
#pragma once

#include <netfold/kernels/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace netfold::protocol {

inline constexpr std::size_t kHeaderBytes = 48;
inline constexpr std::uint16_t kMagic = 0x4e46;
inline constexpr std::uint8_t kVersion = 1;
// 352 four-byte values: with IPv4, UDP, this header and a 16-byte MAC they fill an MTU of 1500 exactly.
inline constexpr std::size_t kEthernetPayloadBytes = 1408;
inline constexpr std::size_t kMaxPayloadBytes = 32768;
inline constexpr std::uint16_t kMaxWorkers = 256;
// Chunks in flight from one worker: far more than any link holds, and 2W still fits 32 bits.
inline constexpr std::uint32_t kMaxWindow = 1 << 20;

enum Flag : std::uint8_t {
  kFromSwitch = 1,
  // 2 is reserved. NaN and infinities need no flag: every wire format carries them in its values (docs/explanation/numbers.md).
  kMismatch = 4,  // an answer without a result: it describes the call of a worker that differs from the reader's
  kHello = 8,     // a path probe, which the switch returns to the registered address with the same length
  kNack = 16,     // an answer without a result: packets of the reader did not come
};

struct Header {
  std::uint8_t flags = 0;
  std::uint32_t job = 0;
  std::uint32_t epoch = 0;
  std::uint32_t incarnation = 0;
  std::uint64_t chunk = 0;
  std::uint64_t packet_number = 0;
  std::uint32_t operation = 0;
  std::uint32_t elements = 0;
  std::uint16_t worker = 0;
  std::uint16_t count = 0;
  std::uint8_t wire = 0;
  std::uint8_t reduce = 0;
  std::uint16_t table = 0;

  bool operator==(const Header&) const = default;
};

// Why a packet changed nothing. Both machines count drops by reason; metrics have the same order.
enum class Drop : std::uint8_t {
  none = 0,
  malformed,        // too short, wrong magic or version, unknown flag, wire format or operator, or impossible count
  length,           // not the length agreed for this job
  foreign,          // another job
  incarnation,      // another incarnation of the switch, which restarted in between
  epoch,            // another epoch of the job
  worker,           // a worker index the job does not have, or not this sender's
  source,           // not the sender's registered address
  unauthenticated,  // the MAC is not its sender's for these bytes
  direction,        // an answer at the switch, or a contribution at a worker
  stale,            // a chunk that every worker has already
  duplicate,        // contributed or received before
  window,           // a chunk that the sender cannot have reached yet
};
inline constexpr int kDropCount = 13;
const char* name(Drop reason);

// Bytes that begin with a valid header. A view borrows the bytes.
class PacketView {
 public:
  static std::optional<PacketView> parse(std::span<const std::byte> bytes);
  Header header() const;
  std::span<const std::byte> payload() const { return bytes_.subspan(kHeaderBytes); }

 private:
  explicit PacketView(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

// Returns the header's `worker` before any check; 0 for bytes that are too short.
std::uint16_t worker_of(std::span<const std::byte> bytes);

// Writes `header` to the first kHeaderBytes of `out`.
void write_header(const Header& header, std::byte* out);

// Returns the nonce of a packet's MAC: flags, length and packet number. `header`: the packet's first kHeaderBytes, as
// written; `bytes`: the packet's length without the MAC. Under one key a nonce stands for one packet only.
// Contributions and results each have packet numbers of their own; NACKs and mismatches, told apart by their flags,
// share one sequence; hellos, which keep their packet number, differ in length.
std::array<std::byte, 12> nonce_of(const std::byte* header, std::size_t bytes);

// The fields of a call on which the ranks of a group must agree before a value is added.
struct CallDescriptor {
  std::uint32_t operation = 0;
  std::uint32_t elements = 0;
  std::uint16_t count = 0;
  std::uint8_t wire = 0;
  std::uint8_t reduce = 0;
  std::uint16_t table = 0;

  static CallDescriptor of(const Header& header);
  void fill(Header& header) const;
  std::size_t value_bytes() const;  // of a packet's values, without the padding
  bool operator==(const CallDescriptor&) const = default;
};

}  // namespace netfold::protocol
