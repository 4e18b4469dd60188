// Records: what authenticates, or encrypts, the bytes of a stream between two processes.
//
//   record   length of the payload, 4 bytes, big-endian; payload; tag, 16 bytes
//   nonce    4 zero bytes; the record's number in its direction, 8 bytes, big-endian, from 0
//   tag      AES-128-GCM (NIST SP 800-38D). authenticate: over length and payload, which stays readable (GMAC).
//            encrypt: over the length and the encrypted payload.
//
// Both ends hold one secret a connection and direction, and derive the key from it by HMAC-SHA256. After
// kRecordsPerKey records both derive the next secret and key: AES-GCM bounds what one key may carry. Records are
// numbered on over a change of key, so a record that is left out, repeated, reordered or taken from another connection
// has a wrong tag.
//
// What must always hold: payload that was not verified never leaves an Opener.
//
//   .venv/bin/python -m pytest tests/native/test_records.py
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace netfold::auth {

// The numeric values travel in the handshake: append only.
enum class Security : std::uint8_t { none, authenticate, encrypt };

inline constexpr std::size_t kSecretBytes = 32;
inline constexpr std::size_t kRecordHeaderBytes = 4;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + 16;
inline constexpr std::size_t kMaxRecordPayload = 64 << 10;
inline constexpr std::uint64_t kRecordsPerKey = 1 << 20;

using Secret = std::array<std::byte, kSecretBytes>;

// For both directions of one connection, at one of its ends.
struct StreamSecrets {
  Security security = Security::none;
  Secret send{};
  Secret receive{};
};

// One direction at one end: the key in use and the number of the next record.
class RecordKey {
 public:
  // Throws std::runtime_error where libcrypto is missing or has no AES-GCM. `opens`: for who reads.
  RecordKey(Security security, const Secret& secret, bool decrypts, std::uint64_t records_per_key);

 protected:
  // The cipher with the next nonce set.
  void* next();

  const Security security_;

 private:
  void derive();

  struct FreeCipher {
    void operator()(void* cipher) const;
  };
  const bool decrypts_;
  const std::uint64_t records_per_key_;
  Secret secret_;
  std::uint64_t number_ = 0;
  std::unique_ptr<void, FreeCipher> cipher_;
};

class RecordProtector : RecordKey {
 public:
  RecordProtector(Security security, const Secret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : RecordKey(security, secret, false, records_per_key) {}

  // Writes a record of the pieces to `out`, which has room for all of them and kRecordOverhead; its length.
  // Precondition: the pieces have at most kMaxRecordPayload bytes.
  std::size_t protect(std::span<const iovec> pieces, std::byte* out);
};

class RecordUnprotector : RecordKey {
 public:
  RecordUnprotector(Security security, const Secret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : RecordKey(security, secret, true, records_per_key) {}

  // Bytes of payload of the record that begins with this header; more than kMaxRecordPayload: it is none.
  static std::size_t payload_bytes(const std::byte* header);
  // Whether this is the next record: its payload can then be read behind the header. After false nothing more may be
  // opened.
  bool unprotect(std::span<std::byte> record);
};

}  // namespace netfold::auth
