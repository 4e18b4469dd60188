#include "net_events.hpp"

#include <atomic>

#include <netfold/nccl/profiler_interface.hpp>

namespace netfold::nccl {
namespace {

std::atomic<ProfilerCallback> callback_{nullptr};

}  // namespace

void set_profiler(ProfilerCallback callback) { callback_.store(callback, std::memory_order_relaxed); }

void* start_net_event(void* of, std::size_t bytes, bool is_send) {
  const ProfilerCallback call = callback_.load(std::memory_order_relaxed);
  if (call == nullptr || of == nullptr) return nullptr;
  NetEvent data{bytes, is_send ? 1U : 0U, 0};
  void* event = nullptr;
  call(&event, kNetEventStart, of, kNetfoldEvents, &data);
  return event;
}

void stop_net_event(void* event, std::size_t bytes, bool is_send) {
  const ProfilerCallback call = callback_.load(std::memory_order_relaxed);
  if (call == nullptr || event == nullptr) return;
  NetEvent data{bytes, is_send ? 1U : 0U, 0};
  call(&event, kNetEventUpdateAndStop, nullptr, kNetfoldEvents, &data);
}

}  // namespace netfold::nccl
