// The functions that NCCL calls, and their tables, one a version of the interface.
//
// No exception may leave them: each becomes a line of NCCL's log and an error code.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "endpoint.hpp"
#include "functions.hpp"
#include "net_events.hpp"

namespace netfold::nccl {
namespace {

// NCCL holds pointers to these.
struct HeldComm {
  std::shared_ptr<Comm> comm;
};
struct HeldListener {
  std::shared_ptr<Listener> listener;
};

// The connections that NCCL asks for again, by the number that it brings back in the handle.
class Pending {
 public:
  std::uint64_t keep(std::shared_ptr<Connecting> connecting) {
    const std::lock_guard lock(mutex_);
    kept_.emplace(++last_, std::move(connecting));
    return last_;
  }
  // Null: there is none of this number.
  std::shared_ptr<Connecting> take(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto node = kept_.extract(number);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Connecting>> kept_;
};

Pending& pending() {
  static auto* const pending = new Pending;
  return *pending;
}

const std::shared_ptr<Comm>& held_comm(void* held) { return static_cast<HeldComm*>(held)->comm; }
Comm& comm_of(void* held) { return *held_comm(held); }

const Registered* registered(void* raw) { return static_cast<const Registered*>(raw); }

// --- the functions ---------------------------------------------------------------------------------------------------

Result init(Logger logger, ProfilerCallback profiler) {
  set_logger(logger);
  set_profiler(profiler);
  return guarded([] {
    inform("uses " + Endpoint::instance().description());
    return Result::success;
  });
}

Result init_v8(Logger logger) { return init(logger, nullptr); }

Result devices(int* count) {
  return guarded([&] {
    *count = static_cast<int>(Endpoint::instance().devices().size());
    return Result::success;
  });
}

// Those that CollNet has, too, and memory of GPUs.
template <auto kOfHost, class Properties>
Result net_properties(int number, Properties* properties) {
  const Result result = kOfHost(number, properties);
  if (result != Result::success) return result;
  return guarded([&] {
    if (Endpoint::instance().reaches_gpus(number)) properties->pointers |= kCudaPointer;
    if (Endpoint::instance().takes_dmabufs(number)) properties->pointers |= kDmabufPointer;
    if (Endpoint::instance().gpus() == nullptr) return result;
    properties->pointers |= kCudaPointer;
    if constexpr (requires { properties->max_message; }) properties->max_message = kMaxStaged;
    return result;
  });
}

Result listen(int device, void* raw, void** listener) {
  return guarded([&] {
    Endpoint::instance().check_switch();
    Handle handle;
    auto held = std::make_unique<HeldListener>(Endpoint::instance().listen(device, handle));
    std::memset(raw, 0, kHandleBytes);
    std::memcpy(raw, &handle, sizeof handle);
    *listener = held.release();
    return Result::success;
  });
}

// NCCL repeats the call until there is a comm. Between the calls the handle holds what is under way.
Result connect(int device, void* raw, void** comm) {
  *comm = nullptr;
  return guarded([&] {
    Endpoint::instance().check_switch();
    Handle handle;
    std::memcpy(&handle, raw, sizeof handle);
    auto connecting = pending().take(handle.pending);
    if (connecting == nullptr) connecting = Endpoint::instance().connect(device, handle);
    const auto keep = [&](std::uint64_t number) {
      std::memcpy(static_cast<std::byte*>(raw) + offsetof(Handle, pending), &number, sizeof number);
    };
    keep(0);
    if (auto made = connecting->take()) {
      *comm = new HeldComm{std::move(made)};
    } else {
      keep(pending().keep(std::move(connecting)));
    }
    return Result::success;
  });
}

Result accept(void* listener, void** comm) {
  *comm = nullptr;
  return guarded([&] {
    if (auto made = static_cast<HeldListener*>(listener)->listener->next()) *comm = new HeldComm{std::move(made)};
    return Result::success;
  });
}

transport::Pipe::GpuLease register_gpu(transport::fabric::StreamMux& fabric, void* data, std::size_t bytes,
                                       transport::fabric::Memory memory) {
  memory.gpu = Endpoint::instance().cuda()->device_of(reinterpret_cast<std::uintptr_t>(data));
  return fabric.lease_gpu(static_cast<std::byte*>(data), bytes, memory);
}

// A fabric keeps the memory registered until NCCL takes the registration back; TCP needs none.
Result register_memory(void* comm, void* data, std::size_t bytes, int kind, void** registration) {
  *registration = nullptr;
  return guarded([&] {
    auto made = std::make_unique<Registered>(held_comm(comm));
    const auto& fabric = comm_of(comm).fabric();
    if (kind == kCudaPointer && Endpoint::instance().cuda() != nullptr) {
      made->gpu = register_gpu(*fabric, data, bytes, {});
    } else if (kind == kCudaPointer && Endpoint::instance().gpus() != nullptr) {
      const auto address = reinterpret_cast<std::uintptr_t>(data);
      made->mirror = std::make_shared<Mirror>(Endpoint::instance().gpus()->of(address), address, bytes);
    } else if (kind != kHostPointer) {
      return gpu_was_not_offered();
    } else if (fabric != nullptr) {
      made->lease = fabric->lease(static_cast<std::byte*>(data), bytes,
                                  transport::fabric::RegistrationCache::Lifetime::persistent);
    } else {
      return Result::success;
    }
    *registration = made.release();
    return Result::success;
  });
}

// dmabuf: of the memory, which NCCL closes after the call; what is registered keeps the memory.
Result register_gpu_dmabuf(void* comm, void* data, std::size_t bytes, int kind, std::uint64_t offset, int dmabuf,
                           void** registration) {
  if (kind != kCudaPointer || Endpoint::instance().cuda() == nullptr) {
    return register_dmabuf(comm, data, bytes, kind, offset, dmabuf, registration);
  }
  *registration = nullptr;
  return guarded([&] {
    auto made = std::make_unique<Registered>(held_comm(comm));
    made->gpu = register_gpu(*comm_of(comm).fabric(), data, bytes, {.dmabuf = dmabuf, .offset = offset});
    *registration = made.release();
    return Result::success;
  });
}

Result deregister_memory(void*, void* registration) {
  return guarded([&] {
    const std::unique_ptr<Registered> memory(static_cast<Registered*>(registration));
    if (memory == nullptr) return Result::success;
    if (const auto comm = memory->comm.lock()) comm->deregister(*memory);
    return Result::success;
  });
}

// profiled: what the profiler gave for the message, null for none; for a receive, one a message.
Result send(void* comm, void* data, std::size_t bytes, int tag, void* registration, void* profiled, void** request) {
  *request = nullptr;
  return guarded([&] {
    Endpoint::instance().check_switch();
    Comm::Request* made = comm_of(comm).send(static_cast<std::byte*>(data), bytes, tag, registered(registration));
    if (made != nullptr) made->events[0] = start_net_event(profiled, bytes, true);
    *request = made;
    return Result::success;
  });
}

Result receive(void* comm, int count, void** data, const std::size_t* bytes, const int* tags, void** registrations,
               void** profiled, void** request) {
  *request = nullptr;
  return guarded([&] {
    Endpoint::instance().check_switch();
    if (count < 1 || count > kMaxReceives) {
      throw std::invalid_argument(std::to_string(count) + " receives in one request; at most " +
                                  std::to_string(kMaxReceives) + " were offered");
    }
    std::array<const Registered*, kMaxReceives> memory;
    std::transform(registrations, registrations + count, memory.begin(), registered);
    Comm::Request* made = comm_of(comm).receive(count, data, bytes, tags, memory.data());
    for (int i = 0; made != nullptr && profiled != nullptr && i < count; ++i) {
      made->events[static_cast<std::size_t>(i)] = start_net_event(profiled[i], bytes[i], false);
    }
    *request = made;
    return Result::success;
  });
}

// The host's memory needs none, and staged copies are done when a request is. One adapter wrote the messages of one comm,
// so that one read flushes all of them.
Result flush(void* comm, int count, void** data, int* bytes, void** registrations, void** request) {
  *request = nullptr;
  return guarded([&] {
    for (int i = 0; i < count && registrations != nullptr; ++i) {
      const Registered* memory = registered(registrations[i]);
      if (memory == nullptr || memory->gpu == nullptr || bytes[i] == 0) continue;
      Comm::Request* made = comm_of(comm).flush(static_cast<std::byte*>(data[i]), *memory);
      if (made == nullptr) throw std::runtime_error("all requests are in use, and none is left for a flush");
      *request = made;
      break;
    }
    return Result::success;
  });
}

Result test(void* raw, int* done, int* bytes) {
  *done = 0;
  return guarded([&] {
    auto& request = *static_cast<Comm::Request*>(raw);
    *done = request.comm().test(request, bytes) ? 1 : 0;
    for (std::size_t i = 0; *done != 0 && i < request.events.size(); ++i) {
      if (void* event = std::exchange(request.events[i], nullptr)) {
        const auto moved = bytes == nullptr ? 0 : static_cast<std::size_t>(bytes[i]);
        stop_net_event(event, moved, request.comm().role() == Comm::Role::sender);
      }
    }
    return Result::success;
  });
}

Result close_comm(void* comm) {
  const std::unique_ptr<HeldComm> held(static_cast<HeldComm*>(comm));
  return guarded([&] {
    if (held != nullptr) Endpoint::instance().close(held->comm);
    return Result::success;
  });
}

Result close_listen(void* listener) {
  const std::unique_ptr<HeldListener> held(static_cast<HeldListener*>(listener));
  return guarded([&] {
    if (held != nullptr) Endpoint::instance().close(*held->listener);
    return Result::success;
  });
}

constexpr Registrations kRegistrations{register_memory, register_gpu_dmabuf, deregister_memory};
// NCCL calls every function whose pointer is not null, after each receive for one.
constexpr Completion kCompletion{flush, test, close_comm, close_comm, close_listen, nullptr, nullptr};
constexpr TransfersV10 kTransfers{
    send, [](void* comm, int count, void** data, std::size_t* bytes, int* tags, void** registrations, void** profiled,
             void** request) { return receive(comm, count, data, bytes, tags, registrations, profiled, request); }};

Result connect_v8(int device, void* handle, void** comm, Ignored*) { return connect(device, handle, comm); }
Result accept_v8(void* listener, void** comm, Ignored*) { return accept(listener, comm); }

Result receive_v8(void* comm, int count, void** data, int* bytes, int* tags, void** registrations, void** request) {
  const auto given = std::span(bytes, static_cast<std::size_t>(std::max(count, 0)));
  const std::vector<std::size_t> sizes(given.begin(), given.end());
  return receive(comm, count, data, sizes.data(), tags, registrations, nullptr, request);
}

template <class Table>
constexpr Table table_v11(decltype(Table::properties) properties) {
  return {"netfold",
          [](void** context, std::uint64_t, Ignored, Logger logger, ProfilerCallback profiler) {
            *context = nullptr;
            return init(logger, profiler);
          },
          devices,
          properties,
          [](void*, int device, void* handle, void** listener) { return listen(device, handle, listener); },
          [](void*, int device, void* handle, void** comm, Ignored*) { return connect(device, handle, comm); },
          accept_v8,
          kRegistrations,
          kTransfers,
          kCompletion,
          nullptr,
          [](void*) { return Result::success; },
          [](void*, Ignored) { return Result::success; }};
}

using Net11 = NetV11<PropertiesV11, 4>;
using Net12 = NetV11<PropertiesV12, 8>;

}  // namespace
}  // namespace netfold::nccl

using namespace netfold::nccl;

NETFOLD_EXPORTED NetV8 ncclNetPlugin_v8{
    "netfold",
    init_v8,
    devices,
    net_properties<properties_v8, PropertiesV8>,
    listen,
    connect_v8,
    accept_v8,
    kRegistrations,
    {[](void* comm, void* data, int bytes, int tag, void* registration, void** request) {
       return send(comm, data, static_cast<std::size_t>(bytes), tag, registration, nullptr, request);
     },
     receive_v8},
    kCompletion};
NETFOLD_EXPORTED NetV9 ncclNetPlugin_v9{
    "netfold",
    init_v8,
    devices,
    net_properties<properties_v9<PropertiesV9>, PropertiesV9>,
    listen,
    connect_v8,
    accept_v8,
    kRegistrations,
    {[](void* comm, void* data, std::size_t bytes, int tag, void* registration, void** request) {
       return send(comm, data, bytes, tag, registration, nullptr, request);
     },
     [](void* comm, int count, void** data, std::size_t* bytes, int* tags, void** registrations, void** request) {
       return receive(comm, count, data, bytes, tags, registrations, nullptr, request);
     }},
    kCompletion,
    nullptr};
NETFOLD_EXPORTED NetV10 ncclNetPlugin_v10{
    "netfold",  init,
    devices,    net_properties<properties_v9<PropertiesV9>, PropertiesV9>,
    listen,     [](int device, Ignored, void* handle, void** comm, Ignored*) { return connect(device, handle, comm); },
    accept_v8,  kRegistrations,
    kTransfers, kCompletion,
    nullptr};
NETFOLD_EXPORTED Net11 ncclNetPlugin_v11 = table_v11<Net11>(net_properties<properties_v11, PropertiesV11>);
NETFOLD_EXPORTED Net12 ncclNetPlugin_v12 = table_v11<Net12>(net_properties<properties_v12, PropertiesV12>);
