#include <netfold/auth/hmac.hpp>
#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/auth/records.hpp>

#include <cstring>
#include <stdexcept>

#include "libcrypto.hpp"

namespace netfold::auth {
namespace {

constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

void store(std::uint64_t value, std::size_t bytes, std::byte* out) {
  for (std::size_t i = bytes; i-- > 0; value >>= 8) out[i] = static_cast<std::byte>(value);
}

Secret derive_secret(const Secret& from, const char* what) {
  return hmac(from, std::as_bytes(std::span(what, std::strlen(what))));
}

}  // namespace

RecordKey::RecordKey(Security security, const Secret& secret, bool decrypts, std::uint64_t records_per_key)
    : security_(security), decrypts_(decrypts), records_per_key_(records_per_key), secret_(secret) {
  if (!unavailable_reason().empty()) throw std::runtime_error(unavailable_reason());
  if (security == Security::none) throw std::invalid_argument("a stream without security has no records");
  cipher_ = CryptoHandle(crypto().new_cipher(), crypto().free_cipher);
  if (!cipher_ || init(crypto().aes_128_gcm(), nullptr, nullptr) != 1) {
    throw std::runtime_error("OpenSSL's libcrypto offers no AES-128-GCM; its configuration may forbid it");
  }
  derive();
}

int RecordKey::init(const void* type, const std::byte* key, const std::byte* nonce) {
  const auto function = decrypts_ ? crypto().init_decrypt : crypto().init;
  return function(cipher_.get(), type, nullptr, bytes_of(key), bytes_of(nonce));
}

void RecordKey::derive() {
  const Secret key = derive_secret(secret_, "netfold record key");
  check(init(nullptr, key.data(), nullptr) == 1, "set the key of a stream");
}

void* RecordKey::next() {
  if (number_ != 0 && number_ % records_per_key_ == 0) {
    secret_ = derive_secret(secret_, "netfold next secret");
    derive();
  }
  std::byte nonce[kNonceBytes]{};
  store(number_++, 8, nonce + kNonceBytes - 8);
  check(init(nullptr, nullptr, nonce) == 1, "set the nonce of a record");
  return cipher_.get();
}

std::size_t RecordProtector::protect(std::span<const iovec> pieces, std::byte* out) {
  const Crypto& library = crypto();
  std::byte* const payload = out + kRecordHeaderBytes;
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  store(bytes, kRecordHeaderBytes, out);
  void* cipher = next();
  int done = 0;
  bool good = library.update(cipher, nullptr, &done, bytes_of(out), kRecordHeaderBytes) == 1;
  std::size_t at = 0;
  for (const iovec& piece : pieces) {
    if (piece.iov_len == 0) continue;
    const auto length = static_cast<int>(piece.iov_len);
    if (security_ == Security::encrypt) {
      const auto* from = static_cast<const unsigned char*>(piece.iov_base);
      good = good && library.update(cipher, bytes_of(payload + at), &done, from, length) == 1;
    } else {
      std::memcpy(payload + at, piece.iov_base, piece.iov_len);
    }
    at += piece.iov_len;
  }
  // Authenticate the copy: the caller's memory may change meanwhile.
  if (security_ == Security::authenticate && bytes > 0) {
    good = good && library.update(cipher, nullptr, &done, bytes_of(payload), static_cast<int>(bytes)) == 1;
  }
  good = good && library.finish(cipher, bytes_of(payload + bytes), &done) == 1;
  good = good && library.control(cipher, kGetTag, kMacBytes, payload + bytes) == 1;
  check(good, "authenticate a record");
  return kRecordOverhead + bytes;
}

std::size_t RecordUnprotector::payload_bytes(const std::byte* header) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < kRecordHeaderBytes; ++i) bytes = bytes << 8 | std::to_integer<std::size_t>(header[i]);
  return bytes;
}

bool RecordUnprotector::unprotect(std::span<std::byte> record) {
  const Crypto& library = crypto();
  std::byte* const payload = record.data() + kRecordHeaderBytes;
  const std::size_t bytes = record.size() - kRecordOverhead;
  void* cipher = next();
  int done = 0;
  bool good = library.control(cipher, kSetTag, kMacBytes, payload + bytes) == 1;
  good = good && library.update_decrypt(cipher, nullptr, &done, bytes_of(record.data()), kRecordHeaderBytes) == 1;
  if (bytes > 0) {
    auto* const to = security_ == Security::encrypt ? bytes_of(payload) : nullptr;
    good = good && library.update_decrypt(cipher, to, &done, bytes_of(payload), static_cast<int>(bytes)) == 1;
  }
  unsigned char unused_output[kBlockBytes];
  return good && library.finish_decrypt(cipher, unused_output, &done) == 1;
}

}  // namespace netfold::auth
