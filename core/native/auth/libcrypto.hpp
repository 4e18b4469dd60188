// The functions of OpenSSL's libcrypto that netfold uses, opened at run time.
#pragma once

#include <cstddef>
#include <string>

namespace netfold::auth {

inline constexpr std::size_t kBlockBytes = 16;

using BlockFunction = void (*)(const unsigned char* in, unsigned char* out, const void* key);
using CounterFunction = void (*)(const unsigned char* in, unsigned char* out, std::size_t blocks, const void* key,
                                 const unsigned char* first);

// From openssl/modes.h, openssl/evp.h, openssl/hmac.h and openssl/crypto.h.
struct Crypto {
  void* (*new_cipher)();
  void (*free_cipher)(void* cipher);
  const void* (*aes_128_ecb)();
  const void* (*aes_128_gcm)();
  int (*init)(void* cipher, const void* type, void* engine, const unsigned char* key, const unsigned char* nonce);
  int (*init_decrypt)(void* cipher, const void* type, void* engine, const unsigned char* key,
                      const unsigned char* nonce);
  int (*encrypt)(void* cipher, unsigned char* out, const unsigned char* in, unsigned bytes);
  int (*update)(void* cipher, unsigned char* out, int* out_bytes, const unsigned char* in, int bytes);
  int (*update_decrypt)(void* cipher, unsigned char* out, int* out_bytes, const unsigned char* in, int bytes);
  int (*finish)(void* cipher, unsigned char* out, int* out_bytes);
  int (*finish_decrypt)(void* cipher, unsigned char* out, int* out_bytes);
  int (*control)(void* cipher, int what, int number, void* data);
  void* (*new_gcm)(void* key, BlockFunction block);
  void (*free_gcm)(void* gcm);
  void (*set_nonce)(void* gcm, const unsigned char* nonce, std::size_t bytes);
  int (*read)(void* gcm, const unsigned char* in, std::size_t bytes);
  int (*encrypt_gcm)(void* gcm, const unsigned char* in, unsigned char* out, std::size_t bytes,
                     CounterFunction counter);
  int (*decrypt_gcm)(void* gcm, const unsigned char* in, unsigned char* out, std::size_t bytes,
                     CounterFunction counter);
  void (*get_tag)(void* gcm, unsigned char* out, std::size_t bytes);
  int (*compare)(const void* a, const void* b, std::size_t bytes);  // in constant time
  const void* (*sha_256)();
  unsigned char* (*hmac)(const void* digest, const void* key, int key_bytes, const unsigned char* data,
                         std::size_t bytes, unsigned char* out, unsigned* out_bytes);
  std::string missing;  // why libcrypto cannot be used; empty where it can

  Crypto();
};

// Lives as long as the process, since contexts may outlive any other owner.
const Crypto& crypto();

// Aborts the process where a function failed that cannot fail with an accepted key: unauthenticated bytes must not
// leave.
void check(bool done, const char* what);

inline unsigned char* bytes_of(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }
inline const unsigned char* bytes_of(const std::byte* data) { return reinterpret_cast<const unsigned char*>(data); }

}  // namespace netfold::auth
