#include "messages.hpp"

#include <netfold/control/membership.hpp>

#include <algorithm>
#include <cstdio>
#include <limits>

namespace netfold::control {
namespace {

// Longest text from the switch that goes into an error, in bytes.
constexpr std::size_t kMaxText = 600;

template <class T>
const T* field(const Value& message, std::string_view name) {
  const Value* value = message.find(name);
  return value == nullptr ? nullptr : std::get_if<T>(&value->data);
}

ProtocolError malformed(std::string_view name) {
  return ProtocolError("its message has no valid field '" + std::string(name) + "'");
}

// Why the switch's version does not fit, and which side to upgrade; empty where it fits.
std::string version_problem(const Value& message) {
  const std::string own =
      "this worker (netfold " NETFOLD_VERSION ") speaks control protocol " + std::to_string(kControlProtocolVersion);
  std::string theirs;
  bool is_older = true;
  if (const auto* version = field<std::uint64_t>(message, "version")) {
    if (*version == kControlProtocolVersion) return {};
    theirs = std::to_string(*version);
    is_older = *version < kControlProtocolVersion;
  } else if (const auto* negative = field<std::int64_t>(message, "version")) {
    theirs = std::to_string(*negative);
  } else {
    return "it does not say which control protocol it speaks, and " + own + ": run the same netfold on both sides";
  }
  return "it speaks control protocol " + theirs + ", " + own + ": upgrade netfold where " +
         (is_older ? "it" : "this worker") + " runs";
}

}  // namespace

void check_reply(const Value& message, std::string_view kind, bool is_first) {
  const std::string& type = *field<std::string>(message, "type");
  // Up to control protocol 5 a refusal has no version field; its text names the version.
  if (is_first && (message.find("version") != nullptr || type == kind)) {
    const std::string problem = version_problem(message);
    if (!problem.empty()) throw ReplyError("cannot be joined: " + problem);
  }
  if (type == "refused") {
    const std::string remedy = text_of(message, "remedy");
    throw ReplyError("refused: " + text_of(message, "reason") + (remedy.empty() ? "" : "; " + remedy));
  }
  if (type != kind) {
    throw ProtocolError("expected '" + std::string(kind) + "', got '" + text_of(message, "type") + "'");
  }
}

std::uint64_t unsigned_of(const Value& message, std::string_view name, std::uint64_t most) {
  const auto* value = field<std::uint64_t>(message, name);
  if (value == nullptr || *value > most) throw malformed(name);
  return *value;
}

const Value::Bytes& bytes_of(const Value& message, std::string_view name) {
  const auto* value = field<Value::Bytes>(message, name);
  if (value == nullptr) throw malformed(name);
  return *value;
}

std::vector<int> ranks_of(const Value& message) {
  const auto* values = field<Value::Array>(message, "ranks");
  if (values == nullptr) throw malformed("ranks");
  std::vector<int> ranks;
  for (const Value& each : *values) {
    const auto* rank = std::get_if<std::uint64_t>(&each.data);
    if (rank == nullptr || *rank > std::numeric_limits<int>::max()) throw malformed("ranks");
    ranks.push_back(static_cast<int>(*rank));
  }
  return ranks;
}

bool flag_of(const Value& message, std::string_view name) {
  const auto* value = field<bool>(message, name);
  return value != nullptr && *value;
}

int fault_of(const Value& message) {
  const auto* rank = field<std::uint64_t>(message, "fault");
  return rank == nullptr || *rank > std::numeric_limits<int>::max() ? -1 : static_cast<int>(*rank);
}

std::string text_of(const Value& message, std::string_view name) {
  const auto* value = field<std::string>(message, name);
  if (value == nullptr) return {};
  std::size_t end = std::min(value->size(), kMaxText);
  while (end < value->size() && end > 0 && (static_cast<unsigned char>((*value)[end]) & 0xc0) == 0x80) --end;
  std::string text = value->substr(0, end);
  // A line of a log stays one line.
  std::ranges::replace_if(text, [](char each) { return static_cast<unsigned char>(each) < 0x20 || each == 0x7f; }, ' ');
  return text;
}

std::string seconds(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / 1e9);
  return text;
}

}  // namespace netfold::control
