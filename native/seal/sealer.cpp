// GCM is driven by its own functions and not through EVP's, which take as long for a packet's nonce and tag as for its
// bytes; AES is EVP's, one block a packet.
#include <netfold/seal/sealer.hpp>

#include <new>
#include <stdexcept>

#include "libcrypto.hpp"

namespace netfold::seal {
namespace {

void encrypt_block(const unsigned char* in, unsigned char* out, const void* cipher) {
  expect(crypto().encrypt(const_cast<void*>(cipher), out, in, kBlockBytes) > 0, "encrypt the nonce of a packet");
}

}  // namespace

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
    expect(library.read(gcm_.get(), bytes, piece.iov_len) == 0, "read a packet");
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
