// The tables of NCCL's collective network (CollNet), one a version of the interface, and their functions. Without
// NETFOLD_SWITCH there is no device, and NCCL calls nothing else.
#include <netfold/kernels/reduce.hpp>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collnet.hpp"
#include "functions.hpp"

namespace netfold::nccl {
namespace {

struct HeldListener {
  std::shared_ptr<Listener> listener;
};

CollComm& comm_of(void* held) { return *static_cast<CollComm*>(held); }

Result init(Logger logger) {
  set_logger(logger);
  return guarded([] {
    Endpoint::instance();
    return Result::success;
  });
}

Result devices(int* count) {
  return guarded([&] {
    const Endpoint& endpoint = Endpoint::instance();
    *count = endpoint.settings().switches.empty() ? 0 : static_cast<int>(endpoint.devices().size());
    return Result::success;
  });
}

Result listen(int device, void* raw, void** listener) {
  return guarded([&] {
    Handle handle;
    auto held = std::make_unique<HeldListener>(Endpoint::instance().listen(device, handle, Listener::Of::members));
    std::memset(raw, 0, kHandleBytes);
    std::memcpy(raw, &handle, sizeof handle);
    *listener = held.release();
    return Result::success;
  });
}

// Success without a comm: NCCL goes on without CollNet.
Result connect(void* handles[], int ranks, int rank, void* listener, void** comm) {
  *comm = nullptr;
  const Result result = guarded([&] {
    std::vector<Handle> all(static_cast<std::size_t>(std::max(ranks, 0)));
    for (std::size_t each = 0; each < all.size(); ++each) std::memcpy(&all[each], handles[each], sizeof(Handle));
    *comm = CollComm::connect(*static_cast<HeldListener*>(listener)->listener, all, rank).release();
    return Result::success;
  });
  if (*comm == nullptr) Endpoint::instance().go_without_switch();
  return result;
}

Result supports(DataType type, Reduction reduction, int* supported) {
  const auto dtype = dtype_of(type);
  const auto reduce = reduce_of(reduction);
  *supported = dtype && reduce && kernels::is_defined(*reduce, *dtype) ? 1 : 0;
  return Result::success;
}

struct Sum {
  kernels::DType dtype;
  kernels::ReduceOp reduce;
};

Sum sum_of(DataType type, Reduction reduction) {
  const auto dtype = dtype_of(type);
  const auto reduce = reduce_of(reduction);
  if (!dtype || !reduce) {
    throw std::invalid_argument("type " + std::to_string(static_cast<int>(type)) + " and reduction " +
                                std::to_string(static_cast<int>(reduction)) + " of NCCL were not offered");
  }
  return {*dtype, *reduce};
}

template <class Count>
Result all_reduce(void* comm, void* data, void* into, Count count, DataType type, Reduction reduction, void*, void*,
                  void** request) {
  *request = nullptr;
  return guarded([&] {
    const auto [dtype, reduce] = sum_of(type, reduction);
    *request = comm_of(comm).all_reduce(static_cast<std::byte*>(data), static_cast<std::byte*>(into),
                                        static_cast<std::size_t>(count), dtype, reduce);
    return Result::success;
  });
}

template <class Size>
std::byte* only(int parts, const Part<Size>* part, std::size_t window_bytes) {
  if (parts != 1 || part->size < window_bytes) {
    throw std::invalid_argument("a window of " + std::to_string(window_bytes) + " bytes has " + std::to_string(parts) +
                                " parts; one part, as long as the window, was offered");
  }
  return static_cast<std::byte*>(part->address);
}

template <class Size>
Result all_gather(void* comm, void* data, int parts, Part<Size>* into, std::size_t bytes_per_rank, std::size_t offset,
                  std::size_t bytes, void*, void** request) {
  *request = nullptr;
  return guarded([&] {
    *request = comm_of(comm).all_gather(static_cast<std::byte*>(data), only(parts, into, bytes),
                                        {bytes_per_rank, offset, bytes});
    return Result::success;
  });
}

template <class Size>
Result reduce_scatter(void* comm, int parts, Part<Size>* data, void* into, std::size_t bytes_per_rank,
                      std::size_t offset, std::size_t bytes, DataType type, Reduction reduction, void*,
                      void** request) {
  *request = nullptr;
  return guarded([&] {
    const auto [dtype, reduce] = sum_of(type, reduction);
    *request = comm_of(comm).reduce_scatter(only(parts, data, bytes), static_cast<std::byte*>(into),
                                            {bytes_per_rank, offset, bytes}, dtype, reduce);
    return Result::success;
  });
}

Result register_memory(void*, void*, std::size_t, int kind, void** registration) {
  *registration = nullptr;
  return kind == kHostPointer ? Result::success : gpu_was_not_offered();
}

Result deregister_memory(void*, void*) { return Result::success; }

// The host's memory needs none.
Result flush(void*, void*, int, void*, void** request) {
  *request = nullptr;
  return Result::success;
}

Result test(void* raw, int* done, int* bytes) {
  *done = 0;
  return guarded([&] {
    auto& request = *static_cast<CollComm::Request*>(raw);
    const auto outcome = request.comm().test(request, bytes);
    *done = outcome == CollComm::Outcome::done ? 1 : 0;
    return outcome == CollComm::Outcome::failed ? Result::remote_error : Result::success;
  });
}

Result close(void* comm) {
  return guarded([&] {
    delete static_cast<CollComm*>(comm);
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

template <class Count, class Size>
constexpr Collectives<Count, Size> kCollectives{connect,
                                                supports,
                                                {register_memory, register_dmabuf, deregister_memory},
                                                all_reduce<Count>,
                                                all_gather<Size>,
                                                reduce_scatter<Size>,
                                                flush,
                                                test,
                                                close,
                                                close_listen};
constexpr auto kCollectivesV9 = kCollectives<std::size_t, std::size_t>;

template <class Table>
constexpr Table table_v11(decltype(Table::properties) properties) {
  return {"netfold",
          [](void** context, std::uint64_t, Logger logger) {
            *context = nullptr;
            return init(logger);
          },
          devices,
          properties,
          [](void*, int device, void* handle, void** listener) { return listen(device, handle, listener); },
          kCollectivesV9,
          nullptr,
          [](void*) { return Result::success; }};
}

constexpr CollNetV9 kTableV9{"netfold", init, devices, properties_v9<PropertiesV9>, listen, kCollectivesV9, nullptr};

}  // namespace
}  // namespace netfold::nccl

using namespace netfold::nccl;

NETFOLD_EXPORTED CollNetV8 ncclCollNetPlugin_v8{"netfold",     init,   devices,
                                                properties_v8, listen, kCollectives<int, std::uint32_t>};
NETFOLD_EXPORTED CollNetV9 ncclCollNetPlugin_v9 = kTableV9;
NETFOLD_EXPORTED CollNetV9 ncclCollNetPlugin_v10 = kTableV9;
NETFOLD_EXPORTED CollNetV11<PropertiesV11, 4> ncclCollNetPlugin_v11 =
    table_v11<CollNetV11<PropertiesV11, 4>>(properties_v11);
NETFOLD_EXPORTED CollNetV11<PropertiesV12, 8> ncclCollNetPlugin_v12 =
    table_v11<CollNetV11<PropertiesV12, 8>>(properties_v12);
