#include "settings.hpp"

#include <netfold/auth/private_file.hpp>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace netfold::nccl {
namespace {

constexpr std::size_t kLeastSecretBytes = 32, kMostSecretBytes = 256;

std::atomic<Logger> logger_{nullptr};

void log(int level, const std::string& text) {
  if (const Logger logger = logger_.load())
    logger(level, kInitAndNet, __FILE__, __LINE__, "NET/netfold: %s", text.c_str());
}

std::string read_secret(const std::string& path) {
  if (path.empty()) return {};
  const auto is_allowed = [](char each) { return std::isalnum(static_cast<unsigned char>(each)) != 0; };
  try {
    std::string text = auth::read_private(path);
    if (text.size() < kLeastSecretBytes || text.size() > kMostSecretBytes || !std::ranges::all_of(text, is_allowed)) {
      throw std::runtime_error("it has to hold 32 to 256 letters and digits, such as `openssl rand -hex 32` prints");
    }
    return text;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("NETFOLD_SECRET_FILE=" + path + ": " + error.what());
  }
}

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

template <class Number>
std::optional<Number> parsed(std::string_view text, Number least, Number most) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), value);
  if (error != std::errc() || end != text.end() || value < least || value > most) return std::nullopt;
  return value;
}

template <class Number>
Number number(const char* name, Number otherwise, Number least, Number most) {
  const std::string_view text = variable(name);
  if (text.empty()) return otherwise;
  const auto value = parsed(text, least, most);
  if (!value) {
    throw std::invalid_argument(std::string(name) + "=" + std::string(text) + " is not a whole number of " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return *value;
}

// "fabric:efa" or "fabric:efa,memory": "efa". Ranks of one host that share memory are NCCL's to connect.
std::string provider_of(std::string_view transport) {
  if (transport.empty() || transport == "auto" || transport == "tcp") return {};
  constexpr std::string_view kFabric = "fabric:", kMemory = ",memory";
  auto provider = transport;
  if (provider.ends_with(kMemory)) provider.remove_suffix(kMemory.size());
  if (provider.starts_with(kFabric)) provider.remove_prefix(kFabric.size());
  if (!transport.starts_with(kFabric) || provider.empty() || provider.find(',') != provider.npos) {
    throw std::invalid_argument("NETFOLD_TRANSPORT=" + std::string(transport) +
                                " is not one of auto, tcp, fabric:PROVIDER, fabric:PROVIDER,memory");
  }
  return std::string(provider);
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
  if (const auto ports = variable("NETFOLD_PORTS"); !ports.empty()) {
    const auto dash = std::min(ports.find('-'), ports.size());
    const auto first = parsed(ports.substr(0, dash), 1, 65535);
    const auto last = dash == ports.size() ? first : parsed(ports.substr(dash + 1), first.value_or(1), 65535);
    if (!first || !last) {
      throw std::invalid_argument("NETFOLD_PORTS=" + std::string(ports) +
                                  " is no port and no range of ports, such as 29600-29607");
    }
    settings.first_port = *first;
    settings.last_port = *last;
  }
  if (const auto cuda = variable("NETFOLD_NCCL_CUDA"); cuda == "direct") {
    settings.cuda = Cuda::direct;
  } else if (cuda == "staged") {
    settings.cuda = Cuda::staged;
  } else if (cuda == "auto") {
    settings.cuda = Cuda::automatic;
  } else if (!cuda.empty() && cuda != "off") {
    throw std::invalid_argument("NETFOLD_NCCL_CUDA=" + std::string(cuda) + " is not one of auto, direct, staged, off");
  }
  settings.streams = number("NETFOLD_NCCL_STREAMS", settings.streams, 1, 8);
  settings.switches = variable("NETFOLD_SWITCH");
  settings.is_switch_required = number("NETFOLD_NCCL_REQUIRE_SWITCH", 0, 0, 1) == 1;
  settings.token_file = variable("NETFOLD_TOKEN_FILE");
  settings.job_name = variable("NETFOLD_JOB_NAME");
  settings.algorithm = variable("NETFOLD_ALGORITHM");
  constexpr int kMostWindowBytes = 1 << 30;
  const int window_bytes = static_cast<int>(settings.window_bytes);
  settings.window_bytes = static_cast<std::size_t>(number("NETFOLD_WINDOW_BYTES", window_bytes, 1, kMostWindowBytes));
  settings.job_secret = read_secret(std::string(variable("NETFOLD_SECRET_FILE")));
  settings.reconnect_ns = 1'000'000'000LL * number("NETFOLD_RECONNECT_S", 10, 0, 3600);
  const auto transport = variable("NETFOLD_TRANSPORT");
  settings.fabric = provider_of(transport);
  settings.is_transport_named = !transport.empty() && transport != "auto";
  if (!settings.fabric.empty() && settings.security != auth::Security::none) {
    throw std::invalid_argument("NETFOLD_SECURITY=" + std::string(variable("NETFOLD_SECURITY")) +
                                " and NETFOLD_TRANSPORT=" + std::string(variable("NETFOLD_TRANSPORT")) +
                                " exclude each other: bytes over a fabric have no protection");
  }
  constexpr auto kMost = std::numeric_limits<std::size_t>::max();
  auto& cache = settings.registrations;
  settings.rma_min_bytes = number<std::size_t>("NETFOLD_RMA_MIN_BYTES", settings.rma_min_bytes, 0, kMost);
  cache.entries = number<std::size_t>("NETFOLD_REGISTRATION_CACHE_ENTRIES", cache.entries, 0, kMost);
  cache.bytes = number<std::size_t>("NETFOLD_REGISTRATION_CACHE_BYTES", cache.bytes, 0, kMost);
  return settings;
}

void set_logger(Logger logger) { logger_.store(logger); }
void warn(const std::string& text) { log(kWarn, text); }
void inform(const std::string& text) { log(kInfo, text); }

}  // namespace netfold::nccl
