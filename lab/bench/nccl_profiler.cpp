// The cost of the plugin's profiler, called as NCCL calls it: nccl_profiler PLUGIN CALLS_A_SECOND SECONDS THREADS [off]
//
// Each thread makes the calls of collectives, a millisecond's share at a time: the API's, the submission's, a kernel's,
// and a send and a receive of four steps each. `off` makes none: the rest is the same. Then one thread makes bursts that
// its ring can hold. Prints: seconds of CPU time, of wall time, number of calls, nanoseconds of a call in a burst.
#include <dlfcn.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <netfold/nccl/profiler_interface.hpp>
#include <thread>
#include <vector>

using namespace netfold::nccl;

namespace {

const ProfilerV5* table = nullptr;

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double cpu_seconds() { return seconds(CLOCK_PROCESS_CPUTIME_ID); }

struct Caller {
  void* context = nullptr;
  bool is_off = false;
  long calls = 0;

  void* start(EventDescription description) {
    ++calls;
    if (is_off) return nullptr;
    void* event = nullptr;
    table->events.start(context, &event, &description);
    return event;
  }
  void stop(void* event) {
    ++calls;
    if (event != nullptr) table->events.stop(event);
  }
  void state(void* event, int what, std::uint64_t value) {
    ++calls;
    StateArguments arguments{.gpu_ns = value};
    if (event != nullptr) table->events.record_state(event, what, &arguments);
  }

  static EventDescription described(int type, void* parent) {
    EventDescription description;
    std::memset(&description, 0, sizeof description);
    description.type = static_cast<std::uint64_t>(type);
    description.parent = parent;
    return description;
  }

  void collective(std::uint64_t sequence) {
    void* group = start(described(event_type::kGroupApi, nullptr));
    auto api = described(event_type::kCollectiveApi, group);
    api.collective_api = {"AllReduce", 1 << 20, "ncclFloat32", 0, nullptr, false};
    void* call = start(api);
    stop(call);
    stop(group);
    auto submitted = described(event_type::kCollective, call);
    submitted.collective = {sequence,      "AllReduce", nullptr, nullptr, 1 << 20,  0,
                            "ncclFloat32", 1,           16,      "RING",  "SIMPLE", nullptr};
    void* operation = start(submitted);
    stop(operation);
    auto channel = described(event_type::kKernelChannel, operation);
    channel.kernel_channel = {0, 1000};
    void* kernel = start(channel);
    for (const bool is_send : {true, false}) {
      auto proxy = described(event_type::kProxyOperation, operation);
      proxy.proxy_operation = {getpid(), 0, 1, 4, 1 << 19, is_send ? 1 : 0};
      void* transfer = start(proxy);
      for (int number = 0; number < 4; ++number) {
        auto described_step = described(event_type::kProxyStep, transfer);
        described_step.proxy_step = {number};
        void* step = start(described_step);
        state(step, is_send ? event_state::kSendGpuWait : event_state::kReceiveWait, 0);
        state(step, is_send ? event_state::kSendWait : event_state::kReceiveGpuWait, 1 << 19);
        stop(step);
      }
      stop(transfer);
    }
    state(kernel, event_state::kKernelStop, 2000);
    stop(kernel);
  }
};

void log_nothing(int, unsigned long, const char*, int, const char*, ...) {}

}  // namespace

int main(int count, char** words) {
  if (count < 5) return 2;
  void* library = dlopen(words[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  table = static_cast<const ProfilerV5*>(dlsym(library, "ncclProfiler_v6"));
  const double wanted = std::atof(words[2]), duration = std::atof(words[3]);
  const int threads = std::atoi(words[4]);
  const bool is_off = count > 5;
  int mask = 0;
  std::vector<Caller> callers(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    Caller& each = callers[static_cast<std::size_t>(i)];
    each.is_off = is_off;
    table->init(&each.context, static_cast<std::uint64_t>(i + 1), &mask, "bench", 1, 1, 0, log_nothing);
    if (!is_off && each.context == nullptr) return std::fprintf(stderr, "NETFOLD_PROFILE names no folder\n"), 1;
  }
  const double cpu = cpu_seconds(), wall = seconds(CLOCK_MONOTONIC);
  std::vector<std::thread> running;
  for (Caller& each : callers) {
    running.emplace_back([&each, wall, wanted, duration, threads] {
      std::uint64_t sequence = 0;
      for (double passed = 0; passed < duration; passed = seconds(CLOCK_MONOTONIC) - wall) {
        while (static_cast<double>(each.calls) < passed * wanted / threads) each.collective(sequence++);
        const timespec pause{0, 1'000'000};
        nanosleep(&pause, nullptr);
      }
    });
  }
  for (auto& each : running) each.join();
  const double cpu_used = cpu_seconds() - cpu, wall_used = seconds(CLOCK_MONOTONIC) - wall;
  long calls = 0;
  for (const Caller& each : callers) calls += each.calls;
  double burst = 0;
  long in_bursts = 0;
  for (int round = 0; round < 20 && !is_off; ++round) {
    const timespec pause{0, 200'000'000};
    nanosleep(&pause, nullptr);
    const long before = callers[0].calls;
    const double began = seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < 40; ++i) callers[0].collective(static_cast<std::uint64_t>(1'000'000 + i));
    burst += seconds(CLOCK_THREAD_CPUTIME_ID) - began;
    in_bursts += callers[0].calls - before;
  }
  for (Caller& each : callers) table->events.finalize(each.context);
  std::printf("%.6f %.6f %ld %.1f\n", cpu_used, wall_used, calls, in_bursts == 0 ? 0 : burst / in_bursts * 1e9);
  return 0;
}
