#include <netfold/transport/fabric/watchdog.hpp>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace netfold::transport::fabric {
namespace {

[[noreturn]] void end_process(const std::string& provider) {
  const std::string text = "netfold: process " + std::to_string(getpid()) + ": provider " + provider +
                           " has been in one call for " + std::to_string(Watchdog::kLooks) +
                           " s and does not come back; a rank that was killed may hold a lock of it in memory that "
                           "they share. This process ends. Ranks of one machine need no such provider: "
                           "NETFOLD_TRANSPORT=auto, or fabric:PROVIDER,memory\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  _exit(1);
}

}  // namespace

struct Watchdog::Monitor {
  std::mutex mutex;
  std::vector<Watchdog*> all;
  int pid = -1;  // whose thread looks: none comes along into a fork

  void run() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      std::lock_guard lock(mutex);
      for (Watchdog* each : all) {
        const std::uint64_t toggles = each->toggles_.load(std::memory_order_relaxed);
        each->looks_ = toggles % 2 == 1 && toggles == each->seen_toggles_ ? each->looks_ + 1 : 0;
        each->seen_toggles_ = toggles;
        if (each->looks_ == kLooks) end_process(each->provider_);
      }
    }
  }
};

// Never destroyed: its thread looks until the process ends.
Watchdog::Monitor& Watchdog::monitor() {
  static auto* const all = new Monitor;
  return *all;
}

Watchdog::Watchdog(std::string provider) : provider_(std::move(provider)) {
  Monitor& here = monitor();
  std::lock_guard lock(here.mutex);
  const bool is_new = here.pid != getpid();
  // Of a parent's wires nobody is in a call here, whatever they looked like at the fork.
  if (is_new) here.all.clear();
  here.all.push_back(this);
  if (!is_new) return;
  here.pid = getpid();
  std::thread([&here] { here.run(); }).detach();
}

Watchdog::~Watchdog() {
  Monitor& here = monitor();
  std::lock_guard lock(here.mutex);
  std::erase(here.all, this);
}

}  // namespace netfold::transport::fabric
