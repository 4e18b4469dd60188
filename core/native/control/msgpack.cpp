#include <netfold/control/msgpack.hpp>

#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

namespace netfold::control {
namespace {

// First bytes of values. The ranges: 0x00 to 0x7f small integers, 0x80 maps, 0x90 arrays, 0xa0 text, 0xe0 to 0xff
// negative integers.
enum Tag : unsigned {
  kFixMap = 0x80,
  kFixArray = 0x90,
  kFixText = 0xa0,
  kNil = 0xc0,
  kFalse = 0xc2,
  kTrue = 0xc3,
  kBytes8 = 0xc4,
  kFloat32 = 0xca,
  kFloat64 = 0xcb,
  kUnsigned8 = 0xcc,
  kSigned8 = 0xd0,
  kText8 = 0xd9,
  kArray16 = 0xdc,
  kMap16 = 0xde,
  kNegative = 0xe0,
};

class Encoder {
 public:
  explicit Encoder(std::vector<std::byte>& out) : out_(out) {}

  void operator()(std::monostate) { byte(kNil); }
  void operator()(bool value) { byte(value ? kTrue : kFalse); }
  void operator()(double value) {
    byte(kFloat64);
    big_endian(std::bit_cast<std::uint64_t>(value), 8);
  }
  void operator()(std::uint64_t value) {
    if (value < kFixMap) return byte(static_cast<unsigned>(value));
    const unsigned log = value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
    byte(kUnsigned8 + log);
    big_endian(value, 1U << log);
  }
  void operator()(std::int64_t value) {
    if (value >= 0) return (*this)(static_cast<std::uint64_t>(value));
    if (value >= -32) return byte(static_cast<unsigned>(value) & 0xff);
    const auto fits = [value](std::int64_t least) { return value >= least; };
    const unsigned log = fits(std::numeric_limits<std::int8_t>::min())    ? 0
                         : fits(std::numeric_limits<std::int16_t>::min()) ? 1
                         : fits(std::numeric_limits<std::int32_t>::min()) ? 2
                                                                          : 3;
    byte(kSigned8 + log);
    big_endian(static_cast<std::uint64_t>(value), 1U << log);
  }
  void operator()(const std::string& value) {
    if (value.size() < 32) {
      byte(kFixText + static_cast<unsigned>(value.size()));
    } else {
      length(kText8, value.size(), 0);
    }
    const auto bytes = std::as_bytes(std::span(value));
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void operator()(const Value::Bytes& value) {
    length(kBytes8, value.size(), 0);
    out_.insert(out_.end(), value.begin(), value.end());
  }
  void operator()(const Value::Array& value) {
    count(kFixArray, kArray16, value.size());
    for (const Value& each : value) std::visit(*this, each.data);
  }
  void operator()(const Value::Map& value) {
    count(kFixMap, kMap16, value.size());
    for (const auto& [key, each] : value) {
      (*this)(key);
      std::visit(*this, each.data);
    }
  }

 private:
  void byte(unsigned value) { out_.push_back(static_cast<std::byte>(value)); }
  void big_endian(std::uint64_t value, unsigned bytes) {
    for (unsigned i = bytes; i-- > 0;) byte(static_cast<unsigned>(value >> (8 * i)) & 0xff);
  }
  // A length of 1 << `least_log`, or more bytes: the first of those tags is `tag`.
  void length(unsigned tag, std::size_t value, unsigned least_log) {
    if (value > 0xffffffff) throw std::length_error("msgpack holds up to 2^32 - 1 bytes or elements");
    const unsigned log = std::max(least_log, value <= 0xff ? 0U : value <= 0xffff ? 1U : 2U);
    byte(tag + log - least_log);
    big_endian(value, 1U << log);
  }
  void count(unsigned small, unsigned tag, std::size_t value) {
    if (value < 16) return byte(small + static_cast<unsigned>(value));
    length(tag, value, 1);
  }

  std::vector<std::byte>& out_;
};

bool is_utf8(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned first = at(i);
    const std::size_t more = first < 0x80 ? 0 : first < 0xc2 ? 4 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    if (first > 0xf4 || more == 4 || text.size() - i <= more) return false;
    for (std::size_t j = 1; j <= more; ++j) {
      if ((at(i + j) & 0xc0) != 0x80) return false;
    }
    // Too long a form, a surrogate, or beyond the last code point.
    if ((first == 0xe0 && at(i + 1) < 0xa0) || (first == 0xed && at(i + 1) > 0x9f) ||
        (first == 0xf0 && at(i + 1) < 0x90) || (first == 0xf4 && at(i + 1) > 0x8f)) {
      return false;
    }
    i += more + 1;
  }
  return true;
}

class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes) : left_(bytes) {}

  Value whole() {
    Value value = next(0);
    if (!left_.empty()) throw ProtocolError("not msgpack: bytes follow the value");
    return value;
  }

 private:
  std::span<const std::byte> take(std::size_t count) {
    if (count > left_.size()) throw ProtocolError("not msgpack: it ends within a value");
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  std::uint64_t number(unsigned bytes) {
    std::uint64_t value = 0;
    for (const std::byte each : take(bytes)) value = value << 8 | std::to_integer<std::uint64_t>(each);
    return value;
  }
  std::string text(std::size_t count) {
    const auto bytes = take(count);
    std::string value(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!is_utf8(value)) throw ProtocolError("not msgpack: text that is not UTF-8");
    return value;
  }
  Value array(std::size_t count, int depth) {
    Value::Array value;
    for (std::size_t i = 0; i < count; ++i) value.push_back(next(depth + 1));
    return value;
  }
  Value map(std::size_t count, int depth) {
    Value::Map value;
    for (std::size_t i = 0; i < count; ++i) {
      Value key = next(depth + 1);
      auto* const name = std::get_if<std::string>(&key.data);
      if (name == nullptr) throw ProtocolError("not msgpack: a map with a key that is no text");
      value.emplace_back(std::move(*name), next(depth + 1));
    }
    return value;
  }
  template <class Integer>
  Value integer() {
    return static_cast<std::make_signed_t<Integer>>(static_cast<Integer>(number(sizeof(Integer))));
  }

  Value next(int depth) {
    if (depth > kMaxDepth) throw ProtocolError("not msgpack: nested too deep");
    const auto tag = static_cast<unsigned>(number(1));
    if (tag < kFixMap) return tag;
    if (tag < kFixArray) return map(tag - kFixMap, depth);
    if (tag < kFixText) return array(tag - kFixArray, depth);
    if (tag < kNil) return text(tag - kFixText);
    if (tag >= kNegative) return static_cast<std::int8_t>(tag);
    switch (tag) {
      case kNil:
        return {};
      case kFalse:
        return false;
      case kTrue:
        return true;
      case kBytes8:
      case kBytes8 + 1:
      case kBytes8 + 2: {
        const auto bytes = take(number(1U << (tag - kBytes8)));
        return Value::Bytes(bytes.begin(), bytes.end());
      }
      case kFloat32:
        return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(number(4))));
      case kFloat64:
        return std::bit_cast<double>(number(8));
      case kUnsigned8:
      case kUnsigned8 + 1:
      case kUnsigned8 + 2:
      case kUnsigned8 + 3:
        return number(1U << (tag - kUnsigned8));
      case kSigned8:
        return integer<std::uint8_t>();
      case kSigned8 + 1:
        return integer<std::uint16_t>();
      case kSigned8 + 2:
        return integer<std::uint32_t>();
      case kSigned8 + 3:
        return integer<std::uint64_t>();
      case kText8:
      case kText8 + 1:
      case kText8 + 2:
        return text(number(1U << (tag - kText8)));
      case kArray16:
      case kArray16 + 1:
        return array(number(2U << (tag - kArray16)), depth);
      case kMap16:
      case kMap16 + 1:
        return map(number(2U << (tag - kMap16)), depth);
      default:
        throw ProtocolError("not msgpack: a type that control messages do not have");
    }
  }

  std::span<const std::byte> left_;
};

}  // namespace

const Value* Value::find(std::string_view key) const {
  const auto* map = std::get_if<Map>(&data);
  if (map == nullptr) return nullptr;
  const auto found = std::find_if(map->rbegin(), map->rend(), [&](const auto& each) { return each.first == key; });
  return found == map->rend() ? nullptr : &found->second;
}

std::vector<std::byte> encode(const Value& value) {
  std::vector<std::byte> out;
  Encoder encoder(out);
  std::visit(encoder, value.data);
  return out;
}

Value decode(std::span<const std::byte> bytes) { return Decoder(bytes).whole(); }

}  // namespace netfold::control
