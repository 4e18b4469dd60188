// Numbers of NCCL's names, as the profiler's files have them.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace netfold::nccl {

struct Name {
  std::string_view nccl, netfold;  // "?" for a name that is not known
};

inline constexpr std::array kFunctions{
    Name{"?", "?"},
    Name{"AllReduce", "all_reduce"},
    Name{"AllGather", "all_gather"},
    Name{"ReduceScatter", "reduce_scatter"},
    Name{"Broadcast", "broadcast"},
    Name{"Reduce", "reduce"},
    Name{"Send", "send"},
    Name{"Recv", "receive"},
    Name{"AlltoAll", "all_to_all"},
    Name{"Gather", "gather"},
    Name{"Scatter", "scatter"},
    Name{"SendRecv", "send_receive"},
    Name{"AllGatherV", "all_gather_v"},
};
inline constexpr std::array kDtypes{
    Name{"?", "?"},
    Name{"ncclInt8", "i8"},
    Name{"ncclUint8", "u8"},
    Name{"ncclInt32", "i32"},
    Name{"ncclUint32", "u32"},
    Name{"ncclInt64", "i64"},
    Name{"ncclUint64", "u64"},
    Name{"ncclFloat16", "f16"},
    Name{"ncclFloat32", "f32"},
    Name{"ncclFloat64", "f64"},
    Name{"ncclBfloat16", "bf16"},
    Name{"ncclFloat8e4m3", "f8e4m3"},
    Name{"ncclFloat8e5m2", "f8e5m2"},
};
inline constexpr std::array kAlgorithms{
    Name{"?", "?"},
    Name{"TREE", "tree"},
    Name{"RING", "ring"},
    Name{"COLLNET_DIRECT", "collnet_direct"},
    Name{"COLLNET_CHAIN", "collnet_chain"},
    Name{"NVLS", "nvls"},
    Name{"NVLS_TREE", "nvls_tree"},
    Name{"PAT", "pat"},
    Name{"CE", "copy_engine"},
};
inline constexpr std::uint8_t kCopyEngine = 8;
static_assert(kAlgorithms[kCopyEngine].nccl == "CE");
inline constexpr std::array kProtocols{
    Name{"?", "?"},
    Name{"LL", "LL"},
    Name{"LL128", "LL128"},
    Name{"SIMPLE", "Simple"},
};

template <std::size_t kCount>
std::uint8_t number_of(const std::array<Name, kCount>& names, const char* name) {
  for (std::size_t i = 1; name != nullptr && i < kCount; ++i) {
    if (names[i].nccl == name) return static_cast<std::uint8_t>(i);
  }
  return 0;
}

}  // namespace netfold::nccl
