// NCCL's interface of profilers, versions 4 to 6: the layouts that NCCL 2.27 (4), 2.28 (5) and 2.29 or later (6) call. A
// later NCCL also loads an earlier version. NCCL 2.23 to 2.26 know versions 1 to 3 only, and load none of these.
//
// Facts from NCCL's headers, src/include/plugin/profiler/profiler_vN.h and nccl_profiler.h; the declarations are
// netfold's own.
#pragma once

#include <netfold/nccl/interface.hpp>

namespace netfold::nccl {

// ncclProfile*: types of events, as bits of the mask that says which ones the profiler wants. NCCL starts the ancestors of
// a wanted event, too.
namespace event_type {
inline constexpr int kCollective = 1 << 1, kPointToPoint = 1 << 2, kProxyOperation = 1 << 3, kProxyStep = 1 << 4,
                     kKernelChannel = 1 << 6, kNetPlugin = 1 << 7, kGroupApi = 1 << 8, kCollectiveApi = 1 << 9,
                     kPointToPointApi = 1 << 10, kKernelLaunch = 1 << 11, kCopyEngineCollective = 1 << 12;
}

// ncclProfilerEventState_t, as far as a time or a size comes with it.
namespace event_state {
inline constexpr int kSendGpuWait = 8, kSendWait = 9, kReceiveWait = 10, kReceiveFlushWait = 11, kReceiveGpuWait = 12,
                     kSendPeerWait = 20, kNetUpdate = 21, kKernelStop = 22;
}

// ncclProfilerEventDescr_v4_t to _v6_t. They differ in the width of `type`, of which version 4 writes one byte, and in
// types of events that come at the end of the union.
struct EventDescription {
  std::uint64_t type;
  void* parent;
  int rank;
  union {
    struct {
      bool captured;
      int depth;
    } group_api;
    struct {
      const char* function;
      std::size_t count;
      const char* dtype;
      int root;
      void* stream;
      bool captured;
    } collective_api;
    struct {
      const char* function;
      std::size_t count;
      const char* dtype;
      void* stream;
      bool captured;
    } point_to_point_api;
    struct {
      std::uint64_t sequence;
      const char* function;
      const void* input;
      void* output;
      std::size_t count;
      int root;
      const char* dtype;
      std::uint8_t channels;
      std::uint8_t warps;
      const char* algorithm;
      const char* protocol;
      void* group;
    } collective;
    struct {
      const char* function;
      void* data;
      const char* dtype;
      std::size_t count;
      int peer;
      std::uint8_t channels;  // version 4: not written
      void* group;
    } point_to_point;
    struct {
      int pid;
      std::uint8_t channel;
      int peer;
      int steps;
      int chunk_bytes;
      int is_send;
    } proxy_operation;
    struct {
      int step;
    } proxy_step;
    struct {
      std::uint8_t channel;
      std::uint64_t gpu_ns;
    } kernel_channel;
    struct {
      std::int64_t id;
      void* data;
    } net_plugin;
    struct {
      std::uint64_t sequence;
      const char* function;
      const void* input;
      void* output;
      std::size_t count;
      int root;
      const char* dtype;
      const char* synchronisation;
      bool within_batch;
      std::uint32_t batch;
      std::uint32_t batches;
      std::uint32_t number;
      void* stream;
    } copy_engine_collective;
  };
};

// ncclProfilerEventStateArgs_v4_t to _v6_t
union StateArguments {
  std::size_t step_bytes;
  void* net_data;
  std::uint64_t gpu_ns;
};

struct ProfilerEvents {
  Result (*start)(void* context, void** event, EventDescription*);
  Result (*stop)(void* event);
  Result (*record_state)(void* event, int state, StateArguments*);
  Result (*finalize)(void* context);
};

// ncclProfiler_v4_t
struct ProfilerV4 {
  const char* name;
  Result (*init)(void** context, int* mask, const char* comm_name, std::uint64_t comm, int nodes, int ranks, int rank,
                 Logger);
  ProfilerEvents events;
};

// ncclProfiler_v5_t and ncclProfiler_v6_t
struct ProfilerV5 {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm, int* mask, const char* comm_name, int nodes, int ranks, int rank,
                 Logger);
  ProfilerEvents events;
};

// Actions of ProfilerCallback.
inline constexpr int kNetEventStart = 0, kNetEventUpdateAndStop = 3;
// The upper 16 bits name a plugin, NCCL's own are 1 and 2; the lower ones are a version.
inline constexpr std::int64_t kNetfoldEvents = 0x4e46'0001;

// The data of netfold's events: at the start, and again at the stop with the bytes that arrived.
struct NetEvent {
  std::uint64_t bytes;
  std::uint32_t is_send;
  std::uint32_t reserved;
};

}  // namespace netfold::nccl
