// A switch's address, and the token that it wants.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace netfold::control {

struct SwitchAddress {
  std::string host;  // a name or a numeric address
  std::uint16_t port = 0;
  std::string fingerprint;  // SHA-256 of its certificate, in lower-case hexadecimal; empty: it speaks no TLS

  // Parses `host:port`, `[v6]:port`, each with `#fingerprint` behind it or without. Throws std::invalid_argument with a
  // sentence about NETFOLD_SWITCH.
  static SwitchAddress parse(std::string_view text);
  // Without the fingerprint.
  std::string endpoint() const;
};

// Returns the token in the file that NETFOLD_TOKEN_FILE names; empty for an empty path. Throws std::runtime_error with a
// sentence that has none of the file's content.
std::string read_token(const std::string& path);

}  // namespace netfold::control
