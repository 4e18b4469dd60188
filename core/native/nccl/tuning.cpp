#include "tuning.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include <netfold/nccl/tuner_interface.hpp>

namespace netfold::nccl {
namespace {

constexpr std::string_view kMagic = "netfold-nccl-tuning";
constexpr int kVersion = 1;
constexpr int kMostRanks = 1 << 24;
constexpr int kMostChannels = 64;
constexpr double kMostGain = 100;
constexpr double kMostUs = 1e12;

std::vector<std::string_view> words_of(std::string_view line) {
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  constexpr std::string_view kSpace = " \t\r";
  for (std::size_t at = line.find_first_not_of(kSpace); at != std::string_view::npos;) {
    const std::size_t end = std::min(line.find_first_of(kSpace, at), line.size());
    words.push_back(line.substr(at, end - at));
    at = line.find_first_not_of(kSpace, end);
  }
  return words;
}

[[noreturn]] void refuse(std::string_view word, const char* what) {
  throw std::invalid_argument("'" + std::string(word) + "' is not " + what);
}

template <std::integral Number>
Number number(std::string_view word, Number least, Number most, const char* what) {
  Number value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || value < least || value > most) refuse(word, what);
  return value;
}

// In any locale of the process. Not every standard library has from_chars for it.
double real(std::string_view word, double least, double most, const char* what) {
  std::istringstream stream{std::string(word)};
  stream.imbue(std::locale::classic());
  double value = 0;
  if (!(stream >> value) || !stream.eof() || !(value >= least && value <= most)) refuse(word, what);
  return value;
}

template <std::size_t kCount>
int index_of(const char* const (&names)[kCount], std::string_view word, const char* what) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (word == names[i]) return static_cast<int>(i);
  }
  refuse(word, what);
}

void expect(const std::vector<std::string_view>& words, std::size_t count, const char* form) {
  if (words.size() != count) throw std::invalid_argument("expected `" + std::string(form) + "`");
}

std::uint32_t fnv(std::string_view text) {
  std::uint32_t hash = 2'166'136'261U;
  for (const char each : text) hash = (hash ^ static_cast<unsigned char>(each)) * 16'777'619U;
  return hash == 0 ? 1 : hash;
}

}  // namespace

Tuning Tuning::parse(std::string_view text) {
  Tuning tuning;
  tuning.checksum_ = fnv(text);
  Shape* shape = nullptr;
  bool has_begun = false, has_ended = false;
  int count = 0;
  try {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      const auto words = words_of(text.substr(at, end - at));
      at = end + 1;
      ++count;
      if (words.empty()) continue;
      if (has_ended) throw std::invalid_argument("something follows `end`");
      if (!has_begun) {
        if (words[0] != kMagic) throw std::invalid_argument("it does not begin with `netfold-nccl-tuning`");
        expect(words, 2, "netfold-nccl-tuning 1");
        if (number(words[1], 0, kMostRanks, "a version") != kVersion) {
          throw std::invalid_argument("version " + std::string(words[1]) + ", and this netfold reads version 1");
        }
        has_begun = true;
      } else if (words[0] == "least-gain") {
        expect(words, 2, "least-gain PART");
        tuning.least_gain_ = real(words[1], 0.0, kMostGain, "a gain of 0 to 100");
      } else if (words[0] == "shape") {
        expect(words, 3, "shape RANKS HOSTS");
        const int ranks = number(words[1], 1, kMostRanks, "a number of ranks");
        const int hosts = number(words[2], 1, ranks, "a number of hosts, at most that of ranks");
        const auto [place, is_new] = tuning.shapes_.try_emplace({ranks, hosts});
        if (!is_new) throw std::invalid_argument("the shape was there before");
        shape = &place->second;
      } else if (words[0] == "end") {
        expect(words, 1, "end");
        has_ended = true;
      } else {
        if (shape == nullptr) throw std::invalid_argument("a `shape` line has to come first");
        expect(words, 6, "COLLECTIVE BYTES ALGORITHM PROTOCOL MICROSECONDS CHANNELS");
        const std::tuple key{index_of(kTunedFunctions, words[0], "a collective"),
                             index_of(kTunedAlgorithms, words[2], "an algorithm of NCCL"),
                             index_of(kTunedProtocols, words[3], "a protocol of NCCL")};
        const double bytes = static_cast<double>(number<std::uint64_t>(words[1], 1, 1ULL << 50, "a number of bytes"));
        const double us = real(words[4], 1e-6, kMostUs, "a time in microseconds");
        Series& series = (*shape)[key];
        if (!series.empty() && series.back().bytes >= bytes) {
          throw std::invalid_argument("the sizes of a collective, algorithm and protocol have to ascend");
        }
        series.push_back({bytes, std::log(us), number(words[5], 0, kMostChannels, "a number of channels, 0 to 64")});
      }
    }
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("line " + std::to_string(count) + ": " + error.what());
  }
  if (!has_ended) throw std::invalid_argument("it is cut off: the last line is not `end`");
  return tuning;
}

Tuning Tuning::read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) throw std::system_error(EIO, std::generic_category(), path);
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMostBytes) throw std::invalid_argument("it is longer than 4 MiB");
  return parse(text);
}

std::optional<Tuning::Row> Tuning::at(const Shape& shape, int function, int algorithm, int protocol,
                                      std::size_t bytes) {
  const auto found = shape.find({function, algorithm, protocol});
  if (found == shape.end()) return std::nullopt;
  const Series& series = found->second;
  const double size = static_cast<double>(bytes);
  const auto above = std::ranges::lower_bound(series, size, {}, &Row::bytes);
  if (above == series.end()) return std::nullopt;
  if (above->bytes == size) return *above;
  if (above == series.begin()) return std::nullopt;
  const Row& below = *std::prev(above);
  const double part = std::log(size / below.bytes) / std::log(above->bytes / below.bytes);
  return Row{size, below.log_us + part * (above->log_us - below.log_us), below.channels};
}

std::optional<Tuning::Choice> Tuning::choose(int ranks, int hosts, int function, std::size_t bytes,
                                             std::span<const float> table, int protocols) const {
  const auto shape = shapes_.find({ranks, hosts});
  if (shape == shapes_.end() || protocols <= 0) return std::nullopt;
  std::size_t nccl = table.size(), best = table.size();
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (table[i] >= 0 && (nccl == table.size() || table[i] < table[nccl])) nccl = i;
  }
  if (nccl == table.size()) return std::nullopt;
  const auto row = [&](std::size_t i) {
    const int at_table = static_cast<int>(i);
    return at(shape->second, function, at_table / protocols, at_table % protocols, bytes);
  };
  const auto now = row(nccl);
  if (!now) return std::nullopt;
  double least = now->log_us - std::log1p(least_gain_);
  int channels = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (i == nccl || !(table[i] >= 0) || table[i] > kMostApart * table[nccl]) continue;
    if (const auto found = row(i); found && found->log_us < least) {
      least = found->log_us;
      best = i;
      channels = found->channels;
    }
  }
  if (best == table.size()) return std::nullopt;
  return Choice{static_cast<int>(best) / protocols, static_cast<int>(best) % protocols, channels};
}

std::uint32_t tuning_checksum() {
  static const std::uint32_t made = [] {
    const char* path = std::getenv("NETFOLD_NCCL_TUNER");
    if (path == nullptr || *path == '\0') return std::uint32_t{0};
    try {
      return Tuning::read(path).checksum();
    } catch (const std::exception&) {  // the tuner says why
      return std::uint32_t{0};
    }
  }();
  return made;
}

}  // namespace netfold::nccl
