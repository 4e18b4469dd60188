#include <dlfcn.h>
#include <netfold/seal/sealer.hpp>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

namespace netfold::seal {
namespace {

// The name says which functions are in it: those of OpenSSL 3.
constexpr const char* kLibrary = "libcrypto.so.3";
constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG

// What we use of libcrypto (openssl/evp.h, openssl/crypto.h).
struct Crypto {
  void* (*new_context)();
  void (*free_context)(void* context);
  const void* (*aes_128_gcm)();
  int (*init)(void* context, const void* cipher, void* engine, const unsigned char* key, const unsigned char* nonce);
  int (*update)(void* context, unsigned char* out, int* out_bytes, const unsigned char* in, int in_bytes);
  int (*finish)(void* context, unsigned char* out, int* out_bytes);
  int (*control)(void* context, int type, int argument, void* pointer);
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
    find(new_context, "EVP_CIPHER_CTX_new");
    find(free_context, "EVP_CIPHER_CTX_free");
    find(aes_128_gcm, "EVP_aes_128_gcm");
    find(init, "EVP_EncryptInit_ex");
    find(update, "EVP_EncryptUpdate");
    find(finish, "EVP_EncryptFinal_ex");
    find(control, "EVP_CIPHER_CTX_ctrl");
    find(compare, "CRYPTO_memcmp");
  }
};

const Crypto& crypto() {
  static const Crypto loaded;  // for as long as the process: contexts may outlive any other owner
  return loaded;
}

// With a context that was made, only a broken library fails; a packet without a tag must not leave.
void expect(int done, const char* what) {
  if (done == 1) return;
  std::fprintf(stderr, "netfold: libcrypto failed to %s a packet\n", what);
  std::abort();
}

const unsigned char* bytes_of(const void* data) { return static_cast<const unsigned char*>(data); }

}  // namespace

const std::string& missing() { return crypto().missing; }

void Sealer::Free::operator()(void* context) const { crypto().free_context(context); }

Sealer::Sealer(const Key& key) {
  if (!missing().empty()) throw std::runtime_error(missing());
  const Crypto& library = crypto();
  context_.reset(library.new_context());
  if (!context_ || library.init(context_.get(), library.aes_128_gcm(), nullptr, bytes_of(key.data()), nullptr) != 1) {
    throw std::runtime_error("OpenSSL's libcrypto offers no AES-128-GCM; its configuration may forbid it");
  }
}

void Sealer::tag(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out) {
  const Crypto& library = crypto();
  void* context = context_.get();
  expect(library.init(context, nullptr, nullptr, nullptr, bytes_of(nonce.data())), "begin");
  int ignored = 0;
  for (const iovec& piece : pieces) {
    if (piece.iov_len == 0) continue;
    expect(library.update(context, nullptr, &ignored, bytes_of(piece.iov_base), static_cast<int>(piece.iov_len)),
           "read");
  }
  unsigned char nothing[kTagBytes];
  expect(library.finish(context, nothing, &ignored), "finish");
  expect(library.control(context, kGetTag, kTagBytes, out), "tag");
}

bool Sealer::matches(const Nonce& nonce, std::span<const std::byte> tagged) {
  const iovec piece{const_cast<std::byte*>(tagged.data()), tagged.size() - kTagBytes};
  std::byte expected[kTagBytes];
  tag(nonce, {&piece, 1}, expected);
  return crypto().compare(expected, tagged.last(kTagBytes).data(), kTagBytes) == 0;
}

}  // namespace netfold::seal
