// Messages from and into memory of a GPU, by way of pinned memory of the host.
//
// NCCL itself has its kernels write to pinned memory where a network offers only the host's, which costs no copy. So
// this is off unless asked for.
#pragma once

#include <netfold/device/cuda_process.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace netfold::nccl {

// One GPU, with a stream for each direction. Functions throw device::CudaError. Thread-safe.
class Gpu {
 public:
  // Makes the streams.
  Gpu(std::shared_ptr<device::CudaProcess> process, std::shared_ptr<device::CudaDriver> driver);

 private:
  friend class Mirror;
  const std::shared_ptr<device::CudaProcess> process_;
  const std::shared_ptr<device::CudaDriver> driver_;
  device::StreamHandle out_ = nullptr;
  device::StreamHandle in_ = nullptr;
  std::mutex mutex_;
  std::multimap<std::size_t, std::byte*> unused_;  // pinned memory, by its size
};

// Pinned memory as large as a registered region of a GPU's memory: a message's bytes have their place in both.
//
// It is there before any message: the driver may let an allocation wait for kernels that run, and NCCL's wait for their
// messages. It is kept for later regions of at least half its size, since freeing it may wait, too.
class Mirror {
 public:
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

  // Throws std::invalid_argument for more than kMaxBytes.
  Mirror(std::shared_ptr<Gpu> gpu, std::uint64_t address, std::size_t bytes);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // Begin a copy of `bytes` at an address in the GPU's memory. Throws std::invalid_argument outside of the region.
  std::shared_ptr<const device::Event> to_host(std::uint64_t address, std::size_t bytes);
  std::shared_ptr<const device::Event> to_gpu(std::uint64_t address, std::size_t bytes);
  bool passed(const device::Event& copied) const;
  // A copy did not end: no later region gets the memory.
  void abandon() { is_abandoned_ = true; }
  // The place of the bytes at an address. Throws std::invalid_argument outside of the region.
  std::byte* at(std::uint64_t address, std::size_t bytes) const;

 private:
  const std::shared_ptr<Gpu> gpu_;
  const std::uint64_t address_;
  const std::size_t bytes_;
  template <class Copy>
  std::shared_ptr<const device::Event> begin(device::StreamHandle stream, Copy copy);

  std::size_t room_ = 0;  // of memory_: bytes_ or more
  std::byte* memory_ = nullptr;
  bool is_abandoned_ = false;
};

// The copy of one message. Keeps the mirror: where a job fails, NCCL takes a registration back while requests are open.
class StagedMessage {
 public:
  // A message in the host's memory: there is nothing to copy.
  StagedMessage() = default;
  StagedMessage(std::shared_ptr<Mirror> mirror, std::uint64_t address, std::size_t bytes)
      : mirror_(std::move(mirror)), address_(address), data_(mirror_->at(address, bytes)) {}

  explicit operator bool() const { return mirror_ != nullptr; }
  std::byte* data() const { return data_; }
  // Begin the copy of a message that is to be sent.
  void fetch(std::size_t bytes);
  // From now on the message is done only after `bring`, which begins the copy of the `bytes` that arrived.
  void expect() { is_awaited_ = true; }
  void bring(std::size_t bytes);
  // Throws device::CudaError for a copy that has not ended after kCopyNs.
  bool is_copying();
  bool is_done() { return !is_awaited_ && !is_copying(); }
  void abandon() const {
    if (copied_ != nullptr) mirror_->abandon();
  }

 private:
  static constexpr std::int64_t kCopyNs = 10'000'000'000;  // many times what a copy takes

  std::shared_ptr<Mirror> mirror_;
  std::uint64_t address_ = 0;
  std::byte* data_ = nullptr;
  bool is_awaited_ = false;
  std::int64_t copied_until_ns_ = 0;
  std::shared_ptr<const device::Event> copied_;  // null: no copy is under way
};

// The GPUs of a process.
class Gpus {
 public:
  // Throws std::runtime_error where there are none.
  Gpus() : process_(device::CudaProcess::open("libcuda.so.1")) {}
  std::shared_ptr<Gpu> of(std::uint64_t address);

 private:
  const std::shared_ptr<device::CudaProcess> process_;
  std::mutex mutex_;
  std::map<std::shared_ptr<device::CudaDriver>, std::shared_ptr<Gpu>> all_;
};

}  // namespace netfold::nccl
