#include "libcrypto.hpp"

#include <netfold/auth/openssl_library.hpp>
#include <netfold/auth/packet_authenticator.hpp>

#include <cstdio>
#include <cstdlib>

namespace netfold::auth {
namespace {

// The name fixes the functions: those of OpenSSL 3.
constexpr const char* kLibrary = "libcrypto.so.3";

}  // namespace

Crypto::Crypto() {
  OpenSslLibrary library(kLibrary);
  library.find(new_cipher, "EVP_CIPHER_CTX_new");
  library.find(free_cipher, "EVP_CIPHER_CTX_free");
  library.find(aes_128_ecb, "EVP_aes_128_ecb");
  library.find(aes_128_gcm, "EVP_aes_128_gcm");
  library.find(init, "EVP_EncryptInit_ex");
  library.find(init_decrypt, "EVP_DecryptInit_ex");
  library.find(encrypt, "EVP_Cipher");
  library.find(update, "EVP_EncryptUpdate");
  library.find(update_decrypt, "EVP_DecryptUpdate");
  library.find(finish, "EVP_EncryptFinal_ex");
  library.find(finish_decrypt, "EVP_DecryptFinal_ex");
  library.find(control, "EVP_CIPHER_CTX_ctrl");
  library.find(new_gcm, "CRYPTO_gcm128_new");
  library.find(free_gcm, "CRYPTO_gcm128_release");
  library.find(set_nonce, "CRYPTO_gcm128_setiv");
  library.find(read, "CRYPTO_gcm128_aad");
  library.find(encrypt_gcm, "CRYPTO_gcm128_encrypt_ctr32");
  library.find(decrypt_gcm, "CRYPTO_gcm128_decrypt_ctr32");
  library.find(get_tag, "CRYPTO_gcm128_tag");
  library.find(compare, "CRYPTO_memcmp");
  library.find(sha_256, "EVP_sha256");
  library.find(hmac, "HMAC");
  missing = library.missing();
}

const Crypto& crypto() {
  static const Crypto loaded;
  return loaded;
}

void check(bool done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "netfold: libcrypto failed to %s\n", what);
  std::abort();
}

const std::string& unavailable_reason() { return crypto().missing; }

}  // namespace netfold::auth
