// Records authenticate, or encrypt, the bytes of a stream between two processes.
//
//   record   length of the payload, 4 bytes, big-endian; payload; tag, 16 bytes
//   nonce    4 zero bytes; the record's number in its direction, 8 bytes, big-endian, from 0
//   tag      AES-128-GCM (NIST SP 800-38D). authenticate: over length and payload, which stays readable (GMAC).
//            encrypt: over the length and the encrypted payload.
//
// Both ends hold one secret per connection and direction, and derive the key from it by HMAC-SHA256. After
// kRecordsPerKey records both derive the next secret and key, since AES-GCM bounds the data under one key. The numbers
// of records continue after a change of key. So a record that is omitted, repeated, reordered or taken from another
// connection has a wrong tag.
//
// What must always hold: a RecordUnprotector never releases payload that was not verified.
//
//   .venv/bin/python -m pytest core/tests/native/test_records.py
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace netfold::auth {

// The numeric values are part of the handshake: append only.
enum class Security : std::uint8_t { none, authenticate, encrypt };

inline constexpr std::size_t kSecretBytes = 32;
inline constexpr std::size_t kRecordHeaderBytes = 4;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + 16;
inline constexpr std::size_t kMaxRecordPayload = 64 << 10;
inline constexpr std::uint64_t kRecordsPerKey = 1 << 20;

using Secret = std::array<std::byte, kSecretBytes>;
// An object of libcrypto, and the function that frees it.
using CryptoHandle = std::unique_ptr<void, void (*)(void*)>;

// The secrets of both directions of a connection, at one of its ends.
struct StreamSecrets {
  Security security = Security::none;
  Secret send{};
  Secret receive{};
};

// One direction at one end: the key in use and the number of the next record.
class RecordKey {
 public:
  // `decrypts`: at the reading end. Throws std::runtime_error where libcrypto is missing or has no AES-GCM.
  RecordKey(Security security, const Secret& secret, bool decrypts, std::uint64_t records_per_key);

 protected:
  // Returns the cipher with the next nonce set.
  void* next();

  const Security security_;

 private:
  int init(const void* type, const std::byte* key, const std::byte* nonce);
  void derive();

  const bool decrypts_;
  const std::uint64_t records_per_key_;
  Secret secret_;
  std::uint64_t number_ = 0;
  CryptoHandle cipher_{nullptr, nullptr};
};

class RecordProtector : RecordKey {
 public:
  RecordProtector(Security security, const Secret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : RecordKey(security, secret, false, records_per_key) {}

  // Writes a record of the pieces to `out`, of at least their bytes and kRecordOverhead; returns the record's length.
  // Precondition: the pieces have at most kMaxRecordPayload bytes.
  std::size_t protect(std::span<const iovec> pieces, std::byte* out);
};

class RecordUnprotector : RecordKey {
 public:
  RecordUnprotector(Security security, const Secret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : RecordKey(security, secret, true, records_per_key) {}

  // Returns the payload bytes of the record with this header; more than kMaxRecordPayload: not a record.
  static std::size_t payload_bytes(const std::byte* header);
  // Whether this is the next record; its payload is then readable behind the header. After false the stream is broken:
  // no further record may be unprotected.
  bool unprotect(std::span<std::byte> record);
};

}  // namespace netfold::auth
