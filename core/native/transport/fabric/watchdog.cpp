#include <netfold/transport/fabric/watchdog.hpp>

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace netfold::transport::fabric {
namespace {

[[noreturn]] void end_process(const std::string& provider) {
  const std::string text = "netfold: process " + std::to_string(getpid()) + ": provider " + provider +
                           " has been in one call for " + std::to_string(Watchdog::kLooks) +
                           " s and does not come back; a rank that was killed may hold one of its locks in shared "
                           "memory. This process ends. Ranks of one machine need no such provider: "
                           "NETFOLD_TRANSPORT=auto, or fabric:PROVIDER,memory\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  _exit(1);
}

}  // namespace

struct Watchdog::Monitor {
  std::mutex mutex;
  std::vector<Watchdog*> watchdogs;
  int pid = -1;  // the process with the monitor thread; a child of fork has no copy of the thread

  void run() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      std::lock_guard lock(mutex);
      for (Watchdog* each : watchdogs) {
        const std::uint64_t toggles = each->toggles_.load(std::memory_order_relaxed);
        each->looks_ = toggles % 2 == 1 && toggles == each->seen_toggles_ ? each->looks_ + 1 : 0;
        each->seen_toggles_ = toggles;
        if (each->looks_ == kLooks) end_process(each->provider_);
      }
    }
  }
};

// Never destroyed: its thread runs until the process ends.
Watchdog::Monitor& Watchdog::monitor() {
  static auto* const monitor = new Monitor;
  return *monitor;
}

Watchdog::Watchdog(std::string provider) : provider_(std::move(provider)) {
  Monitor& of_process = monitor();
  std::lock_guard lock(of_process.mutex);
  const bool is_new = of_process.pid != getpid();
  // In a child of fork, no thread is inside a call of the parent's endpoints.
  if (is_new) of_process.watchdogs.clear();
  of_process.watchdogs.push_back(this);
  if (!is_new) return;
  of_process.pid = getpid();
  std::thread([&of_process] { of_process.run(); }).detach();
}

Watchdog::~Watchdog() {
  Monitor& of_process = monitor();
  std::lock_guard lock(of_process.mutex);
  std::erase(of_process.watchdogs, this);
}

}  // namespace netfold::transport::fabric
