// CUDA's driver library, opened at run time: copies, events and waits of streams on one device.
//
// Nothing of CUDA is needed to build this. The library's names and ABI do not change with the CUDA release (the CUDA
// driver API's reference); its types are handles and integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace netfold::device {

// An error that CUDA's driver reported.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Handles of the driver's: CUstream, which is also a cudaStream_t, and CUevent, which is also a cudaEvent_t.
using StreamHandle = void*;
using EventHandle = void*;

class Event;

// cuGetErrorString. Throws CudaError with its text unless `result` is success.
using ErrorString = int (*)(int error, const char** text);
void check_cuda(int result, const char* function, ErrorString error_string);

// Thread-safe. Functions throw CudaError.
class CudaDriver : public std::enable_shared_from_this<CudaDriver> {
 public:
  // The address of a function by its name; nullptr where there is none.
  using Find = std::function<void*(const char* name)>;

  // Open `library` for device number `device`. Retains the device's primary context as long as the process lives:
  // streams and events belong to it. Throws std::runtime_error where the library or a function is absent.
  static std::shared_ptr<CudaDriver> open(const std::string& library, int device);
  // The functions of `library`, which stays open as long as the process. Throws std::runtime_error where it is absent.
  static Find find_in(const std::string& library);
  // The same with the functions that `find` returns. `name`: of their library.
  static std::shared_ptr<CudaDriver> over(const Find& find, const std::string& name, int device);
  // Throws the std::runtime_error that `over` would for an absent function. Calls none.
  static void require(const Find& find, const std::string& name) { load(find, name); }
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Make the device's primary context the calling thread's current one. All functions below need it.
  void make_current() const;
  // Add a copy to a stream. The host's memory is pinned: the call returns before the copy is done.
  void copy_to_host(StreamHandle stream, std::byte* to, std::uint64_t from, std::size_t bytes) const;
  void copy_to_device(StreamHandle stream, std::uint64_t to, const std::byte* from, std::size_t bytes) const;
  // Record an event after the stream's work so far.
  std::shared_ptr<const Event> record(StreamHandle stream);
  // Have later work of the stream wait for an event that was recorded. Does not block the host.
  void wait(StreamHandle stream, EventHandle event) const;

 private:
  friend class Event;
  using Result = int;             // CUresult
  using Context = void*;          // CUcontext
  using Address = std::uint64_t;  // CUdeviceptr
  struct Functions {
    Result (*get_device)(int* device, int ordinal);
    Result (*retain_context)(Context* context, int device);
    Result (*set_context)(Context context);
    Result (*copy_to_host)(void* to, Address from, std::size_t bytes, StreamHandle stream);
    Result (*copy_to_device)(Address to, const void* from, std::size_t bytes, StreamHandle stream);
    Result (*create_event)(EventHandle* event, unsigned flags);
    Result (*record_event)(EventHandle event, StreamHandle stream);
    Result (*query_event)(EventHandle event);
    Result (*wait_event)(StreamHandle stream, EventHandle event, unsigned flags);
    ErrorString error_string;
  };

  static Functions load(const Find& find, const std::string& name);
  CudaDriver(const Find& find, const std::string& name, int device);
  void check(Result result, const char* function) const { check_cuda(result, function, functions_.error_string); }
  bool passed(EventHandle event) const;
  void give_back(EventHandle event);

  const Functions functions_;
  Context context_ = nullptr;
  std::mutex mutex_;
  // Events that nothing refers to. As many as were ever in use at a time; they live as long as the process.
  std::vector<EventHandle> unused_;
};

// Sets pointers to functions of the library `name`. Throws std::runtime_error for one that it lacks.
struct CudaFunctions {
  const CudaDriver::Find& find;
  const std::string& name;

  template <class Function>
  void operator()(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(find(symbol));
    if (function != nullptr) return;
    throw std::runtime_error("CUDA's driver library " + name + " has no " + symbol + "; install a later driver");
  }
};

// A recorded point in a stream. Recorded once: its handle is recorded again only after the last reference is gone.
class Event {
 public:
  Event(std::shared_ptr<CudaDriver> driver, EventHandle handle) : driver_(std::move(driver)), handle_(handle) {}
  ~Event() { driver_->give_back(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Whether the device has passed the event. Throws the device's error.
  bool passed() const { return driver_->passed(handle_); }
  // Have later work of the stream wait for this event.
  void hold(StreamHandle stream) const { driver_->wait(stream, handle_); }
  EventHandle handle() const { return handle_; }

 private:
  std::shared_ptr<CudaDriver> driver_;
  EventHandle handle_;
};

}  // namespace netfold::device
