#include <netfold/device/cuda_process.hpp>

namespace netfold::device {
namespace {

// Values of cuda.h.
constexpr int kDeviceOrdinal = 9;     // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kPortable = 1;     // CU_MEMHOSTALLOC_PORTABLE

}  // namespace

std::shared_ptr<CudaProcess> CudaProcess::open(const std::string& library) {
  return std::shared_ptr<CudaProcess>(new CudaProcess(CudaDriver::find_in(library), library));
}

CudaProcess::CudaProcess(const CudaDriver::Find& find, const std::string& name) : find_(find), name_(name) {
  CudaDriver::require(find, name);
  const CudaFunctions load{find, name};
  load(functions_.init, "cuInit");
  load(functions_.count_devices, "cuDeviceGetCount");
  load(functions_.get_attribute, "cuPointerGetAttribute");
  load(functions_.get_context, "cuCtxGetCurrent");
  load(functions_.set_context, "cuCtxSetCurrent");
  load(functions_.exchange_mode, "cuThreadExchangeStreamCaptureMode");
  load(functions_.create_stream, "cuStreamCreate");
  load(functions_.allocate_host, "cuMemHostAlloc");
  load(functions_.error_string, "cuGetErrorString");
  check(functions_.init(0), "cuInit");
  int count = 0;
  check(functions_.count_devices(&count), "cuDeviceGetCount");
  if (count == 0) throw std::runtime_error("CUDA's driver library " + name + " finds no device");
}

int CudaProcess::device_of(std::uint64_t address) const {
  int device = 0;
  check(functions_.get_attribute(&device, kDeviceOrdinal, address), "cuPointerGetAttribute");
  return device;
}

std::shared_ptr<CudaDriver> CudaProcess::driver_of(std::uint64_t address) {
  const int device = device_of(address);
  const std::lock_guard lock(mutex_);
  auto& driver = drivers_[device];
  if (driver == nullptr) driver = CudaDriver::over(find_, name_, device);
  return driver;
}

CudaProcess::Entered::Entered(const CudaProcess& process, const CudaDriver& driver)
    : process_(process), mode_(kRelaxed) {
  process_.check(process_.functions_.get_context(&context_), "cuCtxGetCurrent");
  driver.make_current();
  process_.functions_.exchange_mode(&mode_);
}

CudaProcess::Entered::~Entered() {
  process_.functions_.exchange_mode(&mode_);
  process_.functions_.set_context(context_);
}

StreamHandle CudaProcess::new_stream() const {
  StreamHandle stream = nullptr;
  check(functions_.create_stream(&stream, kNonBlocking), "cuStreamCreate");
  return stream;
}

std::byte* CudaProcess::new_pinned(std::size_t bytes) const {
  void* memory = nullptr;
  check(functions_.allocate_host(&memory, bytes, kPortable), "cuMemHostAlloc");
  return static_cast<std::byte*>(memory);
}

}  // namespace netfold::device
