// NCCL's interfaces of network plugins, versions 8 to 12: the layouts that NCCL 2.19 to 2.32 read and call. NCCL looks for
// the newest version that it knows among the symbols ncclNetPlugin_vN of the shared object, and of collective networks
// among ncclCollNetPlugin_vN.
//
// Facts from NCCL's headers, src/include/plugin/net/net_vN.h; the declarations are netfold's own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace netfold::nccl {

// ncclResult_t
enum class Result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
};

inline constexpr std::size_t kHandleBytes = 128;  // NCCL_NET_HANDLE_MAXSIZE
inline constexpr int kMaxRequests = 32;           // NCCL_NET_MAX_REQUESTS, of one comm
inline constexpr int kHostPointer = 1;            // NCCL_PTR_HOST
inline constexpr int kCudaPointer = 2;            // NCCL_PTR_CUDA
inline constexpr int kDmabufPointer = 4;          // NCCL_PTR_DMABUF
inline constexpr int kUndefined = -1;             // NCCL_NET_ID_UNDEF

// ncclDebugLogger_t: level, subsystems, file, line, printf's format.
using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);
inline constexpr int kWarn = 2;
inline constexpr int kInfo = 3;
inline constexpr unsigned long kInitAndNet = 0x1 | 0x10;

template <int kMost>
struct VirtualDevice {
  int count;
  int devices[kMost];
};

// ncclNetProperties_v8_t
struct PropertiesV8 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointers;
  int registers_globally;
  int speed;  // Mbit/s
  int port;
  float latency;  // us; 0: not known
  int max_comms;
  int max_receives;
  int offload;
  int offload_version;
};

// The fields since version 9, in which only the size of `of` has changed.
template <int kDevices>
struct PropertiesSinceV9 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointers;
  int registers_globally;
  int must_flush;
  int speed;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int offload;
  int offload_version;
  VirtualDevice<kDevices> of;
  std::size_t max_message;
  std::size_t max_collective;
};

// ncclNetProperties_v9_t and _v10_t
using PropertiesV9 = PropertiesSinceV9<4>;

// ncclNetProperties_v11_t
struct PropertiesV11 : PropertiesV9 {
  int max_multi_request;
};

// ncclNetProperties_v12_t
struct PropertiesV12 : PropertiesSinceV9<8> {
  int max_multi_request;
  std::int16_t rail;
  std::int16_t plane;
};

// The plugin uses none of them: an offloaded connection, a communicator's settings.
using Ignored = void*;

// ncclProfilerCallback_t: starts and stops events of a network, for which `of` is what NCCL gave with a send or receive.
// The start sets *event where the profiler wants such events.
using ProfilerCallback = Result (*)(void** event, int action, void* of, std::int64_t plugin, void* data);

struct Registrations {
  Result (*add)(void* comm, void* data, std::size_t bytes, int kind, void** registration);
  Result (*add_dmabuf)(void* comm, void* data, std::size_t bytes, int kind, std::uint64_t offset, int fd,
                       void** registration);
  Result (*remove)(void* comm, void* registration);
};

struct Completion {
  Result (*flush)(void* comm, int count, void** data, int* bytes, void** registrations, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_receive)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_registration)(void* comm, void* registration, void** of_device);
  Result (*consumed)(void* comm, int count, void* request);
};

template <class Size>
struct TransfersV8 {
  Result (*send)(void* comm, void* data, Size bytes, int tag, void* registration, void** request);
  Result (*receive)(void* comm, int count, void** data, Size* bytes, int* tags, void** registrations, void** request);
};

// With what the profiler gave for each of them.
struct TransfersV10 {
  Result (*send)(void* comm, void* data, std::size_t bytes, int tag, void* registration, void* profiled,
                 void** request);
  Result (*receive)(void* comm, int count, void** data, std::size_t* bytes, int* tags, void** registrations,
                    void** profiled, void** request);
};

// ncclNet_v8_t
struct NetV8 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*properties)(int device, PropertiesV8*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm, Ignored*);
  Result (*accept)(void* listener, void** comm, Ignored*);
  Registrations registrations;
  TransfersV8<int> transfers;
  Completion completion;
};

// ncclNet_v9_t
struct NetV9 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*properties)(int device, PropertiesV9*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm, Ignored*);
  Result (*accept)(void* listener, void** comm, Ignored*);
  Registrations registrations;
  TransfersV8<std::size_t> transfers;
  Completion completion;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>*);
};

// ncclNet_v10_t
struct NetV10 {
  const char* name;
  Result (*init)(Logger, ProfilerCallback);
  Result (*devices)(int* count);
  Result (*properties)(int device, PropertiesV9*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, Ignored settings, void* handle, void** comm, Ignored*);
  Result (*accept)(void* listener, void** comm, Ignored*);
  Registrations registrations;
  TransfersV10 transfers;
  Completion completion;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>*);
};

// ncclNet_v11_t and ncclNet_v12_t
template <class Properties, int kDevices>
struct NetV11 {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm_id, Ignored settings, Logger, ProfilerCallback);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Result (*connect)(void* context, int device, void* handle, void** comm, Ignored*);
  Result (*accept)(void* listener, void** comm, Ignored*);
  Registrations registrations;
  TransfersV10 transfers;
  Completion completion;
  Result (*make_virtual_device)(int* device, VirtualDevice<kDevices>*);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, Ignored attributes);
};

// --- collective networks (CollNet) -----------------------------------------------------------------------------------

// ncclDataType_t
enum class DataType : int {
  i8 = 0,
  u8 = 1,
  i32 = 2,
  u32 = 3,
  i64 = 4,
  u64 = 5,
  f16 = 6,
  f32 = 7,
  f64 = 8,
  bf16 = 9,
};

// ncclRedOp_t
enum class Reduction : int { sum = 0, product = 1, max = 2, min = 3 };

// ncclNetSGE_vN_t: a part of memory.
template <class Size>
struct Part {
  void* registration;
  void* address;
  Size size;
};

// The functions behind `connect`, which all versions have. In version 8 sizes of parts and counts have fewer bits.
//
// all_gather and reduce_scatter work on a window of the vector of all ranks' blocks, which has bytes_per_rank bytes a
// rank. `data` is the place of the part of this rank's block that lies in the window.
template <class Count, class PartSize>
struct Collectives {
  Result (*connect)(void* handles[], int ranks, int rank, void* listener, void** comm);
  Result (*supports)(DataType type, Reduction reduction, int* supported);
  Registrations registrations;
  Result (*all_reduce)(void* comm, void* data, void* into, Count count, DataType type, Reduction reduction,
                       void* registration, void* registration_into, void** request);
  Result (*all_gather)(void* comm, void* data, int parts, Part<PartSize>* into, std::size_t bytes_per_rank,
                       std::size_t window_offset, std::size_t window_bytes, void* registration, void** request);
  Result (*reduce_scatter)(void* comm, int parts, Part<PartSize>* data, void* into, std::size_t bytes_per_rank,
                           std::size_t window_offset, std::size_t window_bytes, DataType type, Reduction reduction,
                           void* registration_into, void** request);
  Result (*flush)(void* comm, void* data, int bytes, void* registration, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close)(void* comm);
  Result (*close_listen)(void* listener);
};

// ncclCollNet_v8_t
struct CollNetV8 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*properties)(int device, PropertiesV8*);
  Result (*listen)(int device, void* handle, void** listener);
  Collectives<int, std::uint32_t> collectives;
};

// ncclCollNet_v9_t and ncclCollNet_v10_t
struct CollNetV9 {
  const char* name;
  Result (*init)(Logger);
  Result (*devices)(int* count);
  Result (*properties)(int device, PropertiesV9*);
  Result (*listen)(int device, void* handle, void** listener);
  Collectives<std::size_t, std::size_t> collectives;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>*);
};

// ncclCollNet_v11_t and ncclCollNet_v12_t
template <class Properties, int kDevices>
struct CollNetV11 {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm_id, Logger);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Collectives<std::size_t, std::size_t> collectives;
  Result (*make_virtual_device)(int* device, VirtualDevice<kDevices>*);
  Result (*finalize)(void* context);
};

}  // namespace netfold::nccl
