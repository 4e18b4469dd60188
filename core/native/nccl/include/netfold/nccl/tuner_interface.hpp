// NCCL's interface of tuners, versions 3 to 6: the layouts that NCCL 2.22 (3), 2.24 (4), 2.28 (5) and 2.30 (6) call. A
// later NCCL also loads an earlier version.
//
// Facts from NCCL's headers, src/include/plugin/tuner/tuner_vN.h and nccl_tuner.h; the declarations are netfold's own.
#pragma once

#include <netfold/nccl/interface.hpp>

namespace netfold::nccl {

// ncclFunc_t, NCCL_ALGO_* and NCCL_PROTO_* are indices into these.
inline constexpr const char* kTunedFunctions[] = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"};
inline constexpr const char* kTunedAlgorithms[] = {"tree",      "ring", "collnet_direct", "collnet_chain", "nvls",
                                                   "nvls_tree", "pat"};
inline constexpr const char* kTunedProtocols[] = {"LL", "LL128", "Simple"};

// `table` has a time in microseconds for each algorithm and protocol, by rows of protocols. NCCL takes the least one.
// Below 0: NCCL cannot use it.
using CollectiveInfoV3 = Result (*)(void* context, int function, std::size_t bytes, int operations, float** table,
                                    int algorithms, int protocols, int* channels);
using CollectiveInfoV4 = Result (*)(void* context, int function, std::size_t bytes, int operations, float** table,
                                    int algorithms, int protocols, int is_registered, int* channels);

// ncclTuner_v3_t and ncclTuner_v4_t
template <class CollectiveInfo>
struct TunerV3 {
  const char* name;
  Result (*init)(std::size_t ranks, std::size_t nodes, Logger, void** context);
  CollectiveInfo collective_info;
  Result (*destroy)(void* context);
};

// ncclTuner_v5_t
struct TunerV5 {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm, std::size_t ranks, std::size_t nodes, Logger, Ignored domains,
                 Ignored constants);
  CollectiveInfoV4 collective_info;
  Result (*finalize)(void* context);
};

// ncclTuner_v6_t
struct TunerV6 : TunerV5 {
  Ignored chunk_size;  // a function; null: NCCL's own size
};

}  // namespace netfold::nccl
