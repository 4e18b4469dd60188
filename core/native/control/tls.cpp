#include "tls.hpp"

#include <netfold/auth/openssl_library.hpp>

#include <new>
#include <stdexcept>

namespace netfold::control {
namespace {

// The name fixes the functions: those of OpenSSL 3.
constexpr const char* kLibrary = "libssl.so.3";

// From openssl/ssl.h, openssl/bio.h, openssl/x509.h and openssl/err.h.
constexpr int kSetLeastVersion = 123;  // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr long kTls13 = 0x0304;
constexpr int kWantsRead = 2;      // SSL_ERROR_WANT_READ
constexpr int kEnded = 6;          // SSL_ERROR_ZERO_RETURN
constexpr int kPendingBytes = 10;  // BIO_CTRL_PENDING

struct Ssl {
  const void* (*client_method)();
  void* (*new_context)(const void* method);
  void (*free_context)(void* context);
  long (*control_context)(void* context, int what, long number, void* data);
  void* (*new_session)(void* context);
  void (*free_session)(void* session);
  void (*set_bio)(void* session, void* incoming, void* outgoing);  // takes both
  void (*set_client)(void* session);
  int (*shake_hands)(void* session);
  int (*read)(void* session, void* out, int bytes);
  int (*write)(void* session, const void* data, int bytes);
  int (*error)(const void* session, int result);
  void* (*certificate)(const void* session);
  void (*free_certificate)(void* certificate);
  int (*digest_certificate)(const void* certificate, const void* digest, unsigned char* out, unsigned* out_bytes);
  const void* (*sha_256)();
  const void* (*memory)();
  void* (*new_bio)(const void* type);
  void (*free_bio)(void* bio);
  int (*write_bio)(void* bio, const void* data, int bytes);
  int (*read_bio)(void* bio, void* out, int bytes);
  long (*control_bio)(void* bio, int what, long number, void* data);
  unsigned long (*newest_error)();
  const char* (*reason)(unsigned long error);
  void (*clear_errors)();
  std::string missing;  // why libssl cannot be used; empty where it can

  Ssl();
};

Ssl::Ssl() {
  // The search includes libcrypto, on which libssl depends.
  auth::OpenSslLibrary library(kLibrary);
  library.find(client_method, "TLS_client_method");
  library.find(new_context, "SSL_CTX_new");
  library.find(free_context, "SSL_CTX_free");
  library.find(control_context, "SSL_CTX_ctrl");
  library.find(new_session, "SSL_new");
  library.find(free_session, "SSL_free");
  library.find(set_bio, "SSL_set_bio");
  library.find(set_client, "SSL_set_connect_state");
  library.find(shake_hands, "SSL_do_handshake");
  library.find(read, "SSL_read");
  library.find(write, "SSL_write");
  library.find(error, "SSL_get_error");
  library.find(certificate, "SSL_get1_peer_certificate");
  library.find(free_certificate, "X509_free");
  library.find(digest_certificate, "X509_digest");
  library.find(sha_256, "EVP_sha256");
  library.find(memory, "BIO_s_mem");
  library.find(new_bio, "BIO_new");
  library.find(free_bio, "BIO_free_all");
  library.find(write_bio, "BIO_write");
  library.find(read_bio, "BIO_read");
  library.find(control_bio, "BIO_ctrl");
  library.find(newest_error, "ERR_peek_last_error");
  library.find(reason, "ERR_reason_error_string");
  library.find(clear_errors, "ERR_clear_error");
  missing = library.missing();
}

// Lives as long as the process, since sessions may outlive any other owner.
const Ssl& ssl() {
  static const Ssl loaded;
  return loaded;
}

std::runtime_error failure() {
  const char* reason = ssl().reason(ssl().newest_error());
  return std::runtime_error(reason != nullptr ? reason : "TLS failed");
}

}  // namespace

const std::string& tls_unavailable_reason() { return ssl().missing; }

TlsSession::TlsSession() : context_(nullptr, nullptr), session_(nullptr, nullptr) {
  if (!tls_unavailable_reason().empty()) throw std::runtime_error(tls_unavailable_reason());
  ssl().clear_errors();
  context_ = {ssl().new_context(ssl().client_method()), ssl().free_context};
  if (!context_ || ssl().control_context(context_.get(), kSetLeastVersion, kTls13, nullptr) != 1) throw failure();
  session_ = {ssl().new_session(context_.get()), ssl().free_session};
  if (!session_) throw failure();
  incoming_ = ssl().new_bio(ssl().memory());
  outgoing_ = ssl().new_bio(ssl().memory());
  if (incoming_ == nullptr || outgoing_ == nullptr) {
    ssl().free_bio(incoming_);
    ssl().free_bio(outgoing_);
    throw std::bad_alloc();
  }
  ssl().set_bio(session_.get(), incoming_, outgoing_);
  ssl().set_client(session_.get());
}

void TlsSession::feed(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const int length = static_cast<int>(bytes.size());
  if (ssl().write_bio(incoming_, bytes.data(), length) != length) throw std::bad_alloc();
}

std::vector<std::byte> TlsSession::take_outgoing() {
  std::vector<std::byte> out(static_cast<std::size_t>(ssl().control_bio(outgoing_, kPendingBytes, 0, nullptr)));
  if (!out.empty() &&
      ssl().read_bio(outgoing_, out.data(), static_cast<int>(out.size())) != static_cast<int>(out.size()))
    throw failure();
  return out;
}

bool TlsSession::shake_hands() {
  ssl().clear_errors();
  const int result = ssl().shake_hands(session_.get());
  if (result == 1) return true;
  if (ssl().error(session_.get(), result) != kWantsRead) throw failure();
  return false;
}

std::array<std::byte, 32> TlsSession::fingerprint() const {
  std::array<std::byte, 32> digest{};
  unsigned bytes = 0;
  const std::unique_ptr<void, void (*)(void*)> certificate(ssl().certificate(session_.get()), ssl().free_certificate);
  if (!certificate ||
      ssl().digest_certificate(certificate.get(), ssl().sha_256(), reinterpret_cast<unsigned char*>(digest.data()),
                               &bytes) != 1 ||
      bytes != digest.size()) {
    throw std::runtime_error("it has no certificate");
  }
  return digest;
}

bool TlsSession::read(std::vector<std::byte>& out) {
  constexpr std::size_t kRecordBytes = 1 << 14;
  for (;;) {
    const std::size_t before = out.size();
    out.resize(before + kRecordBytes);
    ssl().clear_errors();
    const int result = ssl().read(session_.get(), out.data() + before, kRecordBytes);
    out.resize(before + static_cast<std::size_t>(result > 0 ? result : 0));
    if (result > 0) continue;
    const int error = ssl().error(session_.get(), result);
    if (error == kWantsRead) return true;
    if (error == kEnded) return false;
    throw failure();
  }
}

void TlsSession::write(std::span<const std::byte> bytes) {
  ssl().clear_errors();
  if (ssl().write(session_.get(), bytes.data(), static_cast<int>(bytes.size())) != static_cast<int>(bytes.size())) {
    throw failure();
  }
}

}  // namespace netfold::control
