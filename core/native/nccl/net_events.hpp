// The network plugin's events for NCCL's profiler: one for each message, from its request until NCCL learns of its end.
#pragma once

#include <cstddef>

#include <netfold/nccl/interface.hpp>

namespace netfold::nccl {

// The function that NCCL gave to init. Null: no events.
void set_profiler(ProfilerCallback callback);
// of: what NCCL gave with the send or receive. Null: the profiler does not want it.
void* start_net_event(void* of, std::size_t bytes, bool is_send);
void stop_net_event(void* event, std::size_t bytes, bool is_send);

}  // namespace netfold::nccl
