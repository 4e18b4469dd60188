#include <dlfcn.h>
#include <netfold/device/cuda_driver.hpp>

#include <utility>

namespace netfold::device {
namespace {

// Values of cuda.h.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;          // CUDA_ERROR_NOT_READY
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

void check_cuda(int result, const char* function, ErrorString error_string) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  if (error_string(result, &text) != kSuccess || text == nullptr) text = "an unknown error";
  throw CudaError(std::string(function) + ": " + text + " (CUDA driver error " + std::to_string(result) + ")");
}

CudaDriver::Find CudaDriver::find_in(const std::string& library) {
  // Never closed: streams, events and contexts live as long as the process.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error("CUDA's driver library " + library + " cannot be opened (" +
                             (why ? why : "no reason given") + "); install NVIDIA's driver");
  }
  return [handle](const char* name) { return dlsym(handle, name); };
}

std::shared_ptr<CudaDriver> CudaDriver::open(const std::string& library, int device) {
  return over(find_in(library), library, device);
}

std::shared_ptr<CudaDriver> CudaDriver::over(const Find& find, const std::string& name, int device) {
  return std::shared_ptr<CudaDriver>(new CudaDriver(find, name, device));
}

CudaDriver::Functions CudaDriver::load(const Find& find, const std::string& name) {
  Functions functions{};
  const CudaFunctions into{find, name};
  into(functions.get_device, "cuDeviceGet");
  into(functions.retain_context, "cuDevicePrimaryCtxRetain");
  into(functions.set_context, "cuCtxSetCurrent");
  into(functions.copy_to_host, "cuMemcpyDtoHAsync_v2");
  into(functions.copy_to_device, "cuMemcpyHtoDAsync_v2");
  into(functions.create_event, "cuEventCreate");
  into(functions.record_event, "cuEventRecord");
  into(functions.query_event, "cuEventQuery");
  into(functions.wait_event, "cuStreamWaitEvent");
  into(functions.error_string, "cuGetErrorString");
  return functions;
}

CudaDriver::CudaDriver(const Find& find, const std::string& name, int device) : functions_(load(find, name)) {
  int number = 0;
  check(functions_.get_device(&number, device), "cuDeviceGet");
  check(functions_.retain_context(&context_, number), "cuDevicePrimaryCtxRetain");
}

void CudaDriver::make_current() const { check(functions_.set_context(context_), "cuCtxSetCurrent"); }

void CudaDriver::copy_to_host(StreamHandle stream, std::byte* to, std::uint64_t from, std::size_t bytes) const {
  check(functions_.copy_to_host(to, from, bytes, stream), "cuMemcpyDtoHAsync");
}

void CudaDriver::copy_to_device(StreamHandle stream, std::uint64_t to, const std::byte* from, std::size_t bytes) const {
  check(functions_.copy_to_device(to, from, bytes, stream), "cuMemcpyHtoDAsync");
}

std::shared_ptr<const Event> CudaDriver::record(StreamHandle stream) {
  EventHandle handle = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!unused_.empty()) {
      handle = unused_.back();
      unused_.pop_back();
    }
  }
  if (handle == nullptr) check(functions_.create_event(&handle, kDisableTiming), "cuEventCreate");
  auto event = std::make_shared<const Event>(shared_from_this(), handle);
  check(functions_.record_event(handle, stream), "cuEventRecord");
  return event;
}

void CudaDriver::wait(StreamHandle stream, EventHandle event) const {
  check(functions_.wait_event(stream, event, 0), "cuStreamWaitEvent");
}

bool CudaDriver::passed(EventHandle event) const {
  const Result result = functions_.query_event(event);
  if (result == kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void CudaDriver::give_back(EventHandle event) {
  const std::lock_guard lock(mutex_);
  unused_.push_back(event);
}

}  // namespace netfold::device
