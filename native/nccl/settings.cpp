#include "settings.hpp"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace netfold::nccl {
namespace {

std::atomic<Logger> logger_{nullptr};

void log(int level, const std::string& text) {
  if (const Logger logger = logger_.load())
    logger(level, kInitAndNet, __FILE__, __LINE__, "NET/netfold: %s", text.c_str());
}

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int number(const char* name, int otherwise, int least, int most) {
  const std::string_view text = variable(name);
  if (text.empty()) return otherwise;
  int value = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), value);
  if (error != std::errc() || end != text.end() || value < least || value > most) {
    throw std::invalid_argument(std::string(name) + "=" + std::string(text) + " is not a whole number of " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

}  // namespace

Settings Settings::from_environment() {
  Settings settings;
  if (const auto security = variable("NETFOLD_SECURITY"); security == "authenticate") {
    settings.security = auth::Security::authenticate;
  } else if (security == "encrypt") {
    settings.security = auth::Security::encrypt;
  } else if (!security.empty() && security != "none") {
    throw std::invalid_argument("NETFOLD_SECURITY=" + std::string(security) +
                                " is not one of none, authenticate, encrypt");
  }
  for (auto left = variable("NETFOLD_INTERFACE"); !left.empty();) {
    const auto comma = std::min(left.find(','), left.size());
    if (comma > 0) settings.interfaces.emplace_back(left.substr(0, comma));
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  settings.streams = number("NETFOLD_NCCL_STREAMS", settings.streams, 1, 8);
  settings.reconnect_ns = 1'000'000'000LL * number("NETFOLD_RECONNECT_S", 10, 0, 3600);
  return settings;
}

void set_logger(Logger logger) { logger_.store(logger); }
void warn(const std::string& text) { log(kWarn, text); }
void inform(const std::string& text) { log(kInfo, text); }

}  // namespace netfold::nccl
