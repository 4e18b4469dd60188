// CUDA's driver for code whose process has its CUDA elsewhere, such as a plugin of NCCL: which devices there are, whose
// memory an address is, streams and pinned memory of its own. It leaves a thread's current context and its mode of
// capture as they were.
#pragma once

#include <netfold/device/cuda_driver.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace netfold::device {

// Thread-safe. Functions throw CudaError.
class CudaProcess {
 public:
  // Throws std::runtime_error where the library, a function or a device is absent.
  static std::shared_ptr<CudaProcess> open(const std::string& library);
  CudaProcess(const CudaProcess&) = delete;
  CudaProcess& operator=(const CudaProcess&) = delete;

  // The number of the device that the address belongs to.
  int device_of(std::uint64_t address) const;
  // Of that device. Made once a device; retains its primary context.
  std::shared_ptr<CudaDriver> driver_of(std::uint64_t address);

  // While it lives, `driver`'s context is the thread's current one, and no call ends another thread's capture of a graph.
  class Entered {
   public:
    Entered(const CudaProcess& process, const CudaDriver& driver);
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    const CudaProcess& process_;
    void* context_ = nullptr;
    int mode_;
  };
  // In the current context. Neither ever ends.
  StreamHandle new_stream() const;
  std::byte* new_pinned(std::size_t bytes) const;

 private:
  explicit CudaProcess(const CudaDriver::Find& find, const std::string& name);
  void check(int result, const char* function) const { check_cuda(result, function, functions_.error_string); }

  struct Functions {
    int (*init)(unsigned flags);
    int (*count_devices)(int* count);
    int (*get_attribute)(void* value, int attribute, std::uint64_t address);
    int (*get_context)(void** context);
    int (*set_context)(void* context);
    int (*exchange_mode)(int* mode);
    int (*create_stream)(StreamHandle* stream, unsigned flags);
    int (*allocate_host)(void** memory, std::size_t bytes, unsigned flags);
    ErrorString error_string;
  };
  Functions functions_{};
  const CudaDriver::Find find_;
  const std::string name_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<CudaDriver>> drivers_;  // by device
};

}  // namespace netfold::device
