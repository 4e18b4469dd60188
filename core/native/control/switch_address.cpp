#include <netfold/auth/private_file.hpp>
#include <netfold/control/switch_address.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <stdexcept>

namespace netfold::control {
namespace {

bool is_token(std::string_view text) {
  return text.size() >= 32 && text.size() <= 256 && std::ranges::all_of(text, [](char each) {
           return std::isalnum(static_cast<unsigned char>(each)) != 0 ||
                  std::string_view("_+/=.-").find(each) != std::string_view::npos;
         });
}

}  // namespace

SwitchAddress SwitchAddress::parse(std::string_view text) {
  const auto space = [](char each) { return std::isspace(static_cast<unsigned char>(each)) != 0; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  const auto refuse = [whole = std::string(text)](const char* why) {
    return std::invalid_argument("NETFOLD_SWITCH is '" + whole + "'" + why);
  };
  SwitchAddress address;
  if (const auto hash = text.find('#'); hash != text.npos) {
    address.fingerprint = text.substr(hash + 1);
    text = text.substr(0, hash);
    const auto is_digit = [](char each) { return std::isxdigit(static_cast<unsigned char>(each)) != 0; };
    if (address.fingerprint.size() != 64 || !std::ranges::all_of(address.fingerprint, is_digit)) {
      throw refuse(
          ": behind # stands a certificate's fingerprint, 64 hexadecimal digits, as the switch prints it when it "
          "starts");
    }
    std::ranges::transform(address.fingerprint, address.fingerprint.begin(),
                           [](char each) { return static_cast<char>(std::tolower(static_cast<unsigned char>(each))); });
  }
  const auto colon = text.rfind(':');
  const auto digits = colon == text.npos ? std::string_view() : text.substr(colon + 1);
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), address.port);
  if (colon == text.npos || colon == 0 || digits.empty() || error != std::errc() || end != digits.end()) {
    throw refuse("; expected host:port, such as 127.0.0.1:7171 or [::1]:7171");
  }
  auto host = text.substr(0, colon);
  if (host.starts_with('[')) host.remove_prefix(1);
  if (host.ends_with(']')) host.remove_suffix(1);
  address.host = host;
  return address;
}

std::string SwitchAddress::endpoint() const {
  const bool is_v6 = host.find(':') != host.npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string read_token(const std::string& path) {
  if (path.empty()) return {};
  try {
    std::string token = auth::read_private(path);
    if (!is_token(token)) {
      throw std::runtime_error("a token is 32 to 256 letters and digits, such as `openssl rand -hex 32` prints");
    }
    return token;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("NETFOLD_TOKEN_FILE=" + path + ": " + error.what());
  }
}

}  // namespace netfold::control
