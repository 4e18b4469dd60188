// GCM goes through its own functions and not through EVP, where a packet's nonce and MAC take as long as its bytes. AES
// goes through EVP: one block a packet for the MAC, and for encryption as many more as the packet has.
#include <netfold/auth/packet_authenticator.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

#include "libcrypto.hpp"

namespace netfold::auth {
namespace {

void encrypt_block(const unsigned char* in, unsigned char* out, const void* cipher) {
  check(crypto().encrypt(const_cast<void*>(cipher), out, in, kBlockBytes) > 0, "encrypt the nonce of a packet");
}

// CTR mode as CRYPTO_gcm128_encrypt_ctr32 expects it: the last 32 bits of `first` are the block counter, big-endian.
void encrypt_counter_mode(const unsigned char* in, unsigned char* out, std::size_t blocks, const void* cipher,
                          const unsigned char* first) {
  constexpr std::size_t kBatch = 96;  // blocks; holds the values of a packet for an MTU of 1500
  alignas(64) unsigned char stream[kBatch * kBlockBytes];
  std::uint32_t counter = static_cast<std::uint32_t>(first[12]) << 24 | static_cast<std::uint32_t>(first[13]) << 16 |
                          static_cast<std::uint32_t>(first[14]) << 8 | first[15];
  while (blocks > 0) {
    const std::size_t count = std::min(blocks, kBatch);
    const std::size_t bytes = count * kBlockBytes;
    for (std::size_t i = 0; i < count; ++i, ++counter) {
      unsigned char* block = stream + i * kBlockBytes;
      std::memcpy(block, first, 12);
      for (int byte = 0; byte < 4; ++byte) block[12 + byte] = static_cast<unsigned char>(counter >> (24 - 8 * byte));
    }
    check(crypto().encrypt(const_cast<void*>(cipher), stream, stream, static_cast<unsigned>(bytes)) > 0,
          "encrypt a packet");
    for (std::size_t i = 0; i < bytes; ++i) out[i] = in[i] ^ stream[i];
    in += bytes;
    out += bytes;
    blocks -= count;
  }
}

}  // namespace

PacketAuthenticator::PacketAuthenticator(const Key& key, Security security) : security_(security) {
  if (!unavailable_reason().empty()) throw std::runtime_error(unavailable_reason());
  const Crypto& library = crypto();
  cipher_ = CryptoHandle(library.new_cipher(), library.free_cipher);
  if (!cipher_ || library.init(cipher_.get(), library.aes_128_ecb(), nullptr, bytes_of(key.data()), nullptr) != 1) {
    throw std::runtime_error("OpenSSL's libcrypto offers no AES-128; its configuration may forbid it");
  }
  gcm_ = CryptoHandle(library.new_gcm(cipher_.get(), encrypt_block), library.free_gcm);
  if (!gcm_) throw std::bad_alloc();
}

void PacketAuthenticator::mac(const Nonce& nonce, std::span<const iovec> pieces, std::byte* out) {
  const Crypto& library = crypto();
  library.set_nonce(gcm_.get(), bytes_of(nonce.data()), nonce.size());
  for (const iovec& piece : pieces) {
    const auto* bytes = static_cast<const unsigned char*>(piece.iov_base);
    check(library.read(gcm_.get(), bytes, piece.iov_len) == 0, "read a packet");
  }
  library.get_tag(gcm_.get(), bytes_of(out), kMacBytes);
}

bool PacketAuthenticator::verify(const Nonce& nonce, std::span<const std::byte> packet) {
  const iovec piece{const_cast<std::byte*>(packet.data()), packet.size() - kMacBytes};
  std::byte expected[kMacBytes];
  mac(nonce, {&piece, 1}, expected);
  return crypto().compare(expected, packet.last(kMacBytes).data(), kMacBytes) == 0;
}

void PacketAuthenticator::encrypt(const Nonce& nonce, std::span<const std::byte> header, std::span<const iovec> pieces,
                                  std::byte* out, std::byte* mac) {
  const Crypto& library = crypto();
  library.set_nonce(gcm_.get(), bytes_of(nonce.data()), nonce.size());
  check(library.read(gcm_.get(), bytes_of(header.data()), header.size()) == 0, "read a header");
  for (const iovec& piece : pieces) {
    const auto* from = static_cast<const unsigned char*>(piece.iov_base);
    check(library.encrypt_gcm(gcm_.get(), from, bytes_of(out), piece.iov_len, encrypt_counter_mode) == 0,
          "encrypt a packet");
    out += piece.iov_len;
  }
  library.get_tag(gcm_.get(), bytes_of(mac), kMacBytes);
}

std::span<const std::byte> PacketAuthenticator::open(const Nonce& nonce, std::span<const std::byte> packet,
                                                     std::size_t header_bytes, std::vector<std::byte>& plain) {
  if (!encrypts())
    return verify(nonce, packet) ? packet.first(packet.size() - kMacBytes) : std::span<const std::byte>();
  if (packet.size() != plain.size() + kMacBytes || !decrypt(nonce, packet, header_bytes, plain.data())) return {};
  return plain;
}

bool PacketAuthenticator::decrypt(const Nonce& nonce, std::span<const std::byte> packet, std::size_t header_bytes,
                                  std::byte* out) {
  const Crypto& library = crypto();
  const std::size_t bytes = packet.size() - kMacBytes;
  std::memcpy(out, packet.data(), header_bytes);
  library.set_nonce(gcm_.get(), bytes_of(nonce.data()), nonce.size());
  check(library.read(gcm_.get(), bytes_of(out), header_bytes) == 0, "read a header");
  check(library.decrypt_gcm(gcm_.get(), bytes_of(packet.data() + header_bytes), bytes_of(out + header_bytes),
                            bytes - header_bytes, encrypt_counter_mode) == 0,
        "decrypt a packet");
  std::byte expected[kMacBytes];
  library.get_tag(gcm_.get(), bytes_of(expected), kMacBytes);
  return library.compare(expected, packet.last(kMacBytes).data(), kMacBytes) == 0;
}

}  // namespace netfold::auth
