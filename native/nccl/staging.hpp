// Messages from and into memory of a GPU, by way of pinned memory of the host.
//
// NCCL itself has its kernels write to pinned memory where a network offers only the host's, which costs no copy. So
// this is off unless asked for.
#pragma once

#include <netfold/device/cuda_process.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace netfold::nccl {

// One GPU: a stream for each direction, and the pinned memory of its messages, which is kept for later ones. Functions
// throw device::CudaError. Thread-safe.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  // Makes the streams.
  Staging(std::shared_ptr<device::CudaProcess> process, std::shared_ptr<device::CudaDriver> driver);

  // Pinned memory of a message, and the copy between it and the GPU. The memory may be used again once the copy is done,
  // also where that is after the object's end.
  class Message {
   public:
    Message() = default;
    ~Message() { give_back(); }
    Message(Message&& other) noexcept { *this = std::move(other); }
    Message& operator=(Message&& other) noexcept;

    explicit operator bool() const { return of_ != nullptr; }
    std::byte* data() const { return memory_; }
    bool is_copying();
    // Whether the message is where it belongs.
    bool is_done() { return !is_awaited_ && !is_copying(); }
    // Begin the copy of the `bytes` that arrived to the GPU.
    void bring(std::size_t bytes);

   private:
    friend class Staging;
    void give_back();

    std::shared_ptr<Staging> of_;
    std::uint64_t address_ = 0;  // in the GPU
    std::byte* memory_ = nullptr;
    std::size_t room_ = 0;
    bool is_awaited_ = false;
    std::shared_ptr<const device::Event> copied_;  // null: no copy is under way
  };

  // Begin the copy of a message out of the GPU.
  Message fetch(std::uint64_t address, std::size_t bytes);
  // Room for a message to the GPU.
  Message expect(std::uint64_t address, std::size_t bytes);

 private:
  static constexpr std::size_t kLeastBytes = 64 << 10;
  struct Unused {
    std::byte* memory;
    std::shared_ptr<const device::Event> copied;  // null: no copy is under way
  };

  std::byte* memory_of(std::size_t room);

  const std::shared_ptr<device::CudaProcess> process_;
  const std::shared_ptr<device::CudaDriver> driver_;
  device::StreamHandle out_ = nullptr;
  device::StreamHandle in_ = nullptr;
  std::mutex mutex_;
  std::map<std::size_t, std::deque<Unused>> unused_;  // by room
};

// The GPUs of a process.
class Gpus {
 public:
  // Throws std::runtime_error where there are none.
  Gpus() : process_(device::CudaProcess::open("libcuda.so.1")) {}
  std::shared_ptr<Staging> of(std::uint64_t address);

 private:
  const std::shared_ptr<device::CudaProcess> process_;
  std::mutex mutex_;
  std::map<std::shared_ptr<device::CudaDriver>, std::shared_ptr<Staging>> all_;
};

}  // namespace netfold::nccl
