#include <netfold/protocol/packet.hpp>

#include <bit>
#include <cstring>

namespace netfold::protocol {
namespace {

// Converts between this host's byte order and the network's.
template <class T>
T swapped(T value) {
  if constexpr (std::endian::native == std::endian::big || sizeof(T) == 1) return value;
  if constexpr (sizeof(T) == 2) return __builtin_bswap16(value);
  if constexpr (sizeof(T) == 4) return __builtin_bswap32(value);
  if constexpr (sizeof(T) == 8) return __builtin_bswap64(value);
}

template <class T>
T load_be(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return swapped(value);
}

template <class T>
void store_be(std::byte* at, T value) {
  value = swapped(value);
  std::memcpy(at, &value, sizeof value);
}

constexpr std::uint8_t kKnownFlags = kFromSwitch | kMismatch | kHello | kNack;

}  // namespace

const char* name(Drop reason) {
  constexpr const char* kNames[kDropCount] = {"none",  "malformed", "length", "foreign",         "incarnation",
                                              "epoch", "worker",    "source", "unauthenticated", "direction",
                                              "stale", "duplicate", "window"};
  const auto index = static_cast<std::size_t>(reason);
  return index < kDropCount ? kNames[index] : "unknown drop reason";
}

std::optional<PacketView> PacketView::parse(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  const std::byte* at = bytes.data();
  if (load_be<std::uint16_t>(at) != kMagic || load_be<std::uint8_t>(at + 2) != kVersion) return std::nullopt;
  if ((load_be<std::uint8_t>(at + 3) & ~kKnownFlags) != 0) return std::nullopt;
  if (!kernels::is_valid_dtype(load_be<std::uint8_t>(at + 44))) return std::nullopt;
  if (!kernels::is_valid_reduce_op(load_be<std::uint8_t>(at + 45))) return std::nullopt;
  return PacketView(bytes);
}

Header PacketView::header() const {
  const std::byte* at = bytes_.data();
  return Header{
      .flags = load_be<std::uint8_t>(at + 3),
      .job = load_be<std::uint32_t>(at + 4),
      .epoch = load_be<std::uint32_t>(at + 8),
      .incarnation = load_be<std::uint32_t>(at + 12),
      .chunk = load_be<std::uint64_t>(at + 16),
      .packet_number = load_be<std::uint64_t>(at + 24),
      .operation = load_be<std::uint32_t>(at + 32),
      .elements = load_be<std::uint32_t>(at + 36),
      .worker = load_be<std::uint16_t>(at + 40),
      .count = load_be<std::uint16_t>(at + 42),
      .wire = load_be<std::uint8_t>(at + 44),
      .reduce = load_be<std::uint8_t>(at + 45),
      .table = load_be<std::uint16_t>(at + 46),
  };
}

std::uint16_t worker_of(std::span<const std::byte> bytes) {
  return bytes.size() < kHeaderBytes ? std::uint16_t{0} : load_be<std::uint16_t>(bytes.data() + 40);
}

void write_header(const Header& header, std::byte* out) {
  store_be(out, kMagic);
  store_be(out + 2, kVersion);
  store_be(out + 3, header.flags);
  store_be(out + 4, header.job);
  store_be(out + 8, header.epoch);
  store_be(out + 12, header.incarnation);
  store_be(out + 16, header.chunk);
  store_be(out + 24, header.packet_number);
  store_be(out + 32, header.operation);
  store_be(out + 36, header.elements);
  store_be(out + 40, header.worker);
  store_be(out + 42, header.count);
  store_be(out + 44, header.wire);
  store_be(out + 45, header.reduce);
  store_be(out + 46, header.table);
}

std::array<std::byte, 12> nonce_of(const std::byte* header, std::size_t bytes) {
  std::array<std::byte, 12> nonce;
  store_be(nonce.data(), static_cast<std::uint32_t>(bytes));  // at most 24 bits: the flags have the first byte
  nonce[0] = header[3];
  std::memcpy(nonce.data() + 4, header + 24, sizeof(std::uint64_t));
  return nonce;
}

CallDescriptor CallDescriptor::of(const Header& header) {
  return CallDescriptor{.operation = header.operation,
                        .elements = header.elements,
                        .count = header.count,
                        .wire = header.wire,
                        .reduce = header.reduce,
                        .table = header.table};
}

void CallDescriptor::fill(Header& header) const {
  header.operation = operation;
  header.elements = elements;
  header.count = count;
  header.wire = wire;
  header.reduce = reduce;
  header.table = table;
}

std::size_t CallDescriptor::value_bytes() const {
  return count * kernels::element_bytes(static_cast<kernels::DType>(wire));
}

}  // namespace netfold::protocol
