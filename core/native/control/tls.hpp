// TLS to a switch that is authenticated by the fingerprint of its certificate, by OpenSSL's libssl.
//
// libssl is opened at run time: building needs no headers, and a host without it joins open switches only. The session
// works on memory, and its owner moves the bytes: libssl would write to the socket in a way that raises SIGPIPE.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace netfold::control {

// Why this host has no TLS; empty where it has.
const std::string& tls_unavailable_reason();

// The client's end of one session, TLS 1.3 or newer. No authority and no name is checked: trust rests on the
// fingerprint alone, and the owner compares it before it sends a byte. Not thread-safe.
class TlsSession {
 public:
  // Throws std::runtime_error with tls_unavailable_reason(), or where libssl gives no session.
  TlsSession();

  // Bytes that came from the peer.
  void feed(std::span<const std::byte> bytes);
  // Takes the bytes that are to be sent to the peer.
  std::vector<std::byte> take_outgoing();

  // Whether the handshake is complete. Throws std::runtime_error where it failed.
  bool shake_hands();
  // SHA-256 of the peer's certificate. Precondition: the handshake is complete.
  std::array<std::byte, 32> fingerprint() const;

  // Appends what the peer sent to `out`. False: the peer ended the session. Throws std::runtime_error.
  bool read(std::vector<std::byte>& out);
  void write(std::span<const std::byte> bytes);

 private:
  std::unique_ptr<void, void (*)(void*)> context_;
  std::unique_ptr<void, void (*)(void*)> session_;
  void* incoming_ = nullptr;  // of the session
  void* outgoing_ = nullptr;
};

}  // namespace netfold::control
