#include "profile_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "names.hpp"

namespace netfold::nccl {
namespace {

constexpr int kFormat = 1;
constexpr int kMostFolders = 100;  // of processes with one number, as containers have them

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

transport::Fd open_file(const std::string& path, int flags) {
  transport::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666));
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  return file;
}

void write_all(int file, const void* data, std::size_t bytes, const std::string& path) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw std::system_error(written == 0 ? ENOSPC : errno, std::generic_category(), path);
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (each == '"' || each == '\\' || byte < 0x20 || byte >= 0x7f) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", byte);
      out += escaped.data();
    } else {
      out += each;
    }
  }
  return out + '"';
}

template <std::size_t kCount>
std::string listed(const std::array<Name, kCount>& names) {
  std::string out = "[";
  for (const Name& each : names) out += (out.size() == 1 ? "" : ", ") + json_text(each.netfold);
  return out + "]";
}

// The rank that the job's launcher gave, as core/src/netfold/bootstrap/launchers.py reads it. -1: none did.
int launched_rank() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    // Slurm sets it for a batch script, too.
    if (std::string_view(name) == "SLURM_PROCID" && std::getenv("SLURM_STEP_ID") == nullptr) continue;
    if (const char* value = std::getenv(name)) {
      char* end = nullptr;
      const long rank = std::strtol(value, &end, 10);
      if (end != value && *end == '\0' && rank >= 0 && rank <= INT_MAX) return static_cast<int>(rank);
    }
  }
  return -1;
}

}  // namespace

ProfileFiles::ProfileFiles(const std::string& run) {
  std::filesystem::create_directories(run);
  const std::string folder = run + "/nccl-" + host_name() + "-" + std::to_string(::getpid());
  folder_ = folder;
  for (int number = 2; ::mkdir(folder_.c_str(), 0777) != 0; ++number) {
    if (errno != EEXIST || number > kMostFolders) throw std::system_error(errno, std::generic_category(), folder_);
    folder_ = folder + "-" + std::to_string(number);
  }
  operations_ = open_file(folder_ + "/operations", O_APPEND);
  transfers_ = open_file(folder_ + "/transfers", O_APPEND);
}

void ProfileFiles::append(const std::vector<OperationRecord>& operations,
                          const std::vector<TransferRecord>& transfers) {
  write_all(operations_.get(), operations.data(), operations.size() * sizeof(OperationRecord), folder_ + "/operations");
  write_all(transfers_.get(), transfers.data(), transfers.size() * sizeof(TransferRecord), folder_ + "/transfers");
}

void ProfileFiles::describe(const ProfileAbout& about) {
  std::string comms;
  for (const CommAbout& each : about.comms) {
    std::array<char, 20> id{};
    std::snprintf(id.data(), id.size(), "%016llx", static_cast<unsigned long long>(each.id));
    comms += (comms.empty() ? "" : ",\n  ") + std::string("{\"id\": ") + json_text(id.data()) +
             ", \"name\": " + json_text(each.name) + ", \"rank\": " + std::to_string(each.rank) +
             ", \"ranks\": " + std::to_string(each.ranks) + ", \"nodes\": " + std::to_string(each.nodes) + "}";
  }
  const std::string text =
      "{\"format\": " + std::to_string(kFormat) + ",\n \"host\": " + json_text(host_name()) +
      ",\n \"pid\": " + std::to_string(::getpid()) + ",\n \"rank\": " + std::to_string(launched_rank()) +
      ",\n \"interface\": " + std::to_string(about.interface) + ",\n \"comms\": [" + comms +
      "],\n \"names\": {\"operation\": " + listed(kFunctions) + ",\n  \"dtype\": " + listed(kDtypes) +
      ",\n  \"algorithm\": " + listed(kAlgorithms) + ",\n  \"protocol\": " + listed(kProtocols) +
      "},\n \"dropped_events\": " + std::to_string(about.dropped_events) +
      ",\n \"unknown_events\": " + std::to_string(about.unknown_events) +
      ",\n \"has_ended\": " + (about.has_ended ? "true" : "false") + "}\n";
  const std::string path = folder_ + "/metadata.json";
  {
    const transport::Fd file = open_file(path + ".new", O_TRUNC);
    write_all(file.get(), text.data(), text.size(), path);
  }
  if (::rename((path + ".new").c_str(), path.c_str()) != 0) {
    throw std::system_error(errno, std::generic_category(), path);
  }
}

}  // namespace netfold::nccl
