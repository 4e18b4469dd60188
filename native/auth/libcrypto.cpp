#include "libcrypto.hpp"

#include <dlfcn.h>
#include <netfold/auth/packet_authenticator.hpp>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace netfold::auth {
namespace {

// The name says which functions are in it: those of OpenSSL 3.
constexpr const char* kLibrary = "libcrypto.so.3";

}  // namespace

Crypto::Crypto() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    missing = std::string("OpenSSL's ") + kLibrary + " cannot be opened (" + (why ? why : "no reason given") + ")";
    return;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = std::string("OpenSSL's ") + kLibrary + " has no " + name;
  };
  find(new_cipher, "EVP_CIPHER_CTX_new");
  find(free_cipher, "EVP_CIPHER_CTX_free");
  find(aes_128_ecb, "EVP_aes_128_ecb");
  find(aes_128_gcm, "EVP_aes_128_gcm");
  find(init, "EVP_EncryptInit_ex");
  find(init_decrypt, "EVP_DecryptInit_ex");
  find(encrypt, "EVP_Cipher");
  find(update, "EVP_EncryptUpdate");
  find(update_decrypt, "EVP_DecryptUpdate");
  find(finish, "EVP_EncryptFinal_ex");
  find(finish_decrypt, "EVP_DecryptFinal_ex");
  find(control, "EVP_CIPHER_CTX_ctrl");
  find(new_gcm, "CRYPTO_gcm128_new");
  find(free_gcm, "CRYPTO_gcm128_release");
  find(set_nonce, "CRYPTO_gcm128_setiv");
  find(read, "CRYPTO_gcm128_aad");
  find(encrypt_gcm, "CRYPTO_gcm128_encrypt_ctr32");
  find(decrypt_gcm, "CRYPTO_gcm128_decrypt_ctr32");
  find(get_tag, "CRYPTO_gcm128_tag");
  find(compare, "CRYPTO_memcmp");
  find(sha_256, "EVP_sha256");
  find(hmac, "HMAC");
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

const std::string& missing() { return crypto().missing; }

}  // namespace netfold::auth
