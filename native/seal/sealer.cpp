#include <dlfcn.h>
#include <netfold/seal/sealer.hpp>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace netfold::seal {
namespace {

// The name says which functions are in it: those of OpenSSL 3.
constexpr const char* kLibrary = "libcrypto.so.3";
constexpr std::size_t kBlockBytes = 16;

using Block = void (*)(const unsigned char* in, unsigned char* out, const void* key);

// What we use of libcrypto (openssl/modes.h, openssl/evp.h, openssl/crypto.h). GCM is driven by its own functions and
// not through EVP's, which take as long for a packet's nonce and tag as for its bytes; AES is EVP's, one block a
// packet.
struct Crypto {
  void* (*new_cipher)();
  void (*free_cipher)(void* cipher);
  const void* (*aes_128_ecb)();
  int (*init)(void* cipher, const void* type, void* engine, const unsigned char* key, const unsigned char* nonce);
  int (*encrypt)(void* cipher, unsigned char* out, const unsigned char* in, unsigned bytes);
  void* (*new_gcm)(void* key, Block block);
  void (*free_gcm)(void* gcm);
  void (*set_nonce)(void* gcm, const unsigned char* nonce, std::size_t bytes);
  int (*read)(void* gcm, const unsigned char* in, std::size_t bytes);
  void (*get_tag)(void* gcm, unsigned char* out, std::size_t bytes);
  int (*compare)(const void* a, const void* b, std::size_t bytes);  // in constant time
  std::string missing;

  Crypto() {
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
    find(init, "EVP_EncryptInit_ex");
    find(encrypt, "EVP_Cipher");
    find(new_gcm, "CRYPTO_gcm128_new");
    find(free_gcm, "CRYPTO_gcm128_release");
    find(set_nonce, "CRYPTO_gcm128_setiv");
    find(read, "CRYPTO_gcm128_aad");
    find(get_tag, "CRYPTO_gcm128_tag");
    find(compare, "CRYPTO_memcmp");
  }
};

const Crypto& crypto() {
  static const Crypto loaded;  // for as long as the process: contexts may outlive any other owner
  return loaded;
}

// With a key that was accepted only a broken library fails; a packet with a wrong tag must not leave.
void expect(bool done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "netfold: libcrypto failed to %s a packet\n", what);
  std::abort();
}

unsigned char* bytes_of(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }
const unsigned char* bytes_of(const std::byte* data) { return reinterpret_cast<const unsigned char*>(data); }

void encrypt_block(const unsigned char* in, unsigned char* out, const void* cipher) {
  expect(crypto().encrypt(const_cast<void*>(cipher), out, in, kBlockBytes) > 0, "encrypt the nonce of");
}

}  // namespace

const std::string& missing() { return crypto().missing; }

void Sealer::FreeCipher::operator()(void* cipher) const { crypto().free_cipher(cipher); }
void Sealer::FreeGcm::operator()(void* gcm) const { crypto().free_gcm(gcm); }

Sealer::Sealer(const Key& key) {
  if (!missing().empty()) throw std::runtime_error(missing());
  const Crypto& library = crypto();
  cipher_.reset(library.new_cipher());
  if (!cipher_ || library.init(cipher_.get(), library.aes_128_ecb(), nullptr, bytes_of(key.data()), nullptr) != 1) {
    throw std::runtime_error("OpenSSL's libcrypto offers no AES-128; its configuration may forbid it");
  }
  gcm_.reset(library.new_gcm(cipher_.get(), encrypt_block));
  if (!gcm_) throw std::bad_alloc();
}

void Sealer::tag(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out) {
  const Crypto& library = crypto();
  library.set_nonce(gcm_.get(), bytes_of(nonce.data()), nonce.size());
  for (const iovec& piece : pieces) {
    const auto* bytes = static_cast<const unsigned char*>(piece.iov_base);
    expect(library.read(gcm_.get(), bytes, piece.iov_len) == 0, "read");
  }
  library.get_tag(gcm_.get(), bytes_of(out), kTagBytes);
}

bool Sealer::matches(const Nonce& nonce, std::span<const std::byte> tagged) {
  const iovec piece{const_cast<std::byte*>(tagged.data()), tagged.size() - kTagBytes};
  std::byte expected[kTagBytes];
  tag(nonce, {&piece, 1}, expected);
  return crypto().compare(expected, tagged.last(kTagBytes).data(), kTagBytes) == 0;
}

}  // namespace netfold::seal
