// The functions of NCCL's tuner interface, in a shared object of its own: NCCL would take a tuner in the network plugin's
// object without being asked, and choose a little differently with any tuner than with none.
//
// On only where NETFOLD_NCCL_TUNER names a file. No exception leaves a function. A file that cannot be used is one line
// of NCCL's log, and NCCL's own choices stay.
#include <cmath>
#include <cstdlib>
#include <exception>
#include <memory>
#include <span>
#include <string>

#include <netfold/nccl/tuner_interface.hpp>
#include "../tuning.hpp"

namespace netfold::nccl {
namespace {

constexpr unsigned long kInitAndTuning = 0x1 | 0x100;

struct Context {
  std::shared_ptr<const Tuning> tuning;
  int ranks = 0, hosts = 0;
};

void log(Logger logger, int level, const std::string& text) {
  if (logger != nullptr) logger(level, kInitAndTuning, __FILE__, __LINE__, "TUNER/netfold: %s", text.c_str());
}

// One reading for all communicators of the process: they must not see a file that changes.
struct Reading {
  std::shared_ptr<const Tuning> tuning;
  std::string problem;
};

const Reading& reading() {
  static const Reading made = [] {
    const char* path = std::getenv("NETFOLD_NCCL_TUNER");
    if (path == nullptr || *path == '\0') return Reading{};
    try {
      return Reading{std::make_shared<const Tuning>(Tuning::read(path)), ""};
    } catch (const std::exception& error) {
      return Reading{nullptr, "NETFOLD_NCCL_TUNER=" + std::string(path) + ": " + error.what() +
                                  "; NCCL chooses by itself; write the file again with netfold nccl-tuning"};
    }
  }();
  return made;
}

Result init(void** context, std::size_t ranks, std::size_t hosts, Logger logger) {
  *context = nullptr;
  try {
    const auto& [tuning, problem] = reading();
    if (!problem.empty()) {
      log(logger, kWarn, problem);
    } else if (tuning != nullptr) {
      const int all = static_cast<int>(ranks), apart = static_cast<int>(hosts);
      const std::string shape = std::to_string(ranks) + " ranks on " + std::to_string(hosts) + " hosts";
      if (tuning->has(all, apart)) {
        *context = new Context{tuning, all, apart};
        log(logger, kInfo, "uses the table for " + shape + ", checksum " + std::to_string(tuning->checksum()));
      } else {
        log(logger, kInfo,
            "NETFOLD_NCCL_TUNER has no table for " + shape + ": NCCL chooses by itself; add one with --shape " +
                std::to_string(ranks) + "x" + std::to_string(hosts));
      }
    }
  } catch (const std::exception&) {  // no memory: NCCL chooses by itself
  }
  return Result::success;
}

// operations: that NCCL joins in one kernel. The table is of single ones.
Result collective_info(void* raw, int function, std::size_t bytes, int operations, float** table, int algorithms,
                       int protocols, int* channels) {
  if (raw == nullptr || operations > 1 || algorithms <= 0 || protocols <= 0) return Result::success;
  const auto& context = *static_cast<const Context*>(raw);
  const std::span times(reinterpret_cast<float*>(table), static_cast<std::size_t>(algorithms * protocols));
  float nccl = -1;
  for (const float each : times) {
    if (each >= 0 && (nccl < 0 || each < nccl)) nccl = each;
  }
  const auto choice = context.tuning->choose(context.ranks, context.hosts, function, bytes, times, protocols);
  if (!choice || !(nccl > 0)) return Result::success;
  // Just below NCCL's choice: NCCL takes the least time, and its estimates go on to be estimates.
  times[static_cast<std::size_t>(choice->algorithm * protocols + choice->protocol)] = std::nextafter(nccl, 0.0F);
  if (choice->channels > 0) *channels = choice->channels;
  return Result::success;
}

Result collective_info_v4(void* context, int function, std::size_t bytes, int operations, float** table, int algorithms,
                          int protocols, int, int* channels) {
  return collective_info(context, function, bytes, operations, table, algorithms, protocols, channels);
}

Result destroy(void* context) {
  delete static_cast<Context*>(context);
  return Result::success;
}

constexpr TunerV5 kTable{"netfold",
                         [](void** context, std::uint64_t, std::size_t ranks, std::size_t hosts, Logger logger, Ignored,
                            Ignored) { return init(context, ranks, hosts, logger); },
                         collective_info_v4, destroy};

}  // namespace
}  // namespace netfold::nccl

#define NETFOLD_EXPORTED extern "C" __attribute__((visibility("default"))) const

using namespace netfold::nccl;

NETFOLD_EXPORTED TunerV3<CollectiveInfoV3> ncclTunerPlugin_v3{
    "netfold",
    [](std::size_t ranks, std::size_t hosts, Logger logger, void** context) {
      return init(context, ranks, hosts, logger);
    },
    collective_info, destroy};
NETFOLD_EXPORTED TunerV3<CollectiveInfoV4> ncclTunerPlugin_v4{
    "netfold",
    [](std::size_t ranks, std::size_t hosts, Logger logger, void** context) {
      return init(context, ranks, hosts, logger);
    },
    collective_info_v4, destroy};
NETFOLD_EXPORTED TunerV5 ncclTunerPlugin_v5 = kTable;
NETFOLD_EXPORTED TunerV6 ncclTunerPlugin_v6{kTable, nullptr};
