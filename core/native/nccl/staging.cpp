#include "staging.hpp"

#include <netfold/transport/socket.hpp>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace netfold::nccl {

using Entered = device::CudaProcess::Entered;

Gpu::Gpu(std::shared_ptr<device::CudaProcess> process, std::shared_ptr<device::CudaDriver> driver)
    : process_(std::move(process)), driver_(std::move(driver)) {
  const Entered entered(*process_, *driver_);
  out_ = process_->new_stream();
  in_ = process_->new_stream();
}

Mirror::Mirror(std::shared_ptr<Gpu> gpu, std::uint64_t address, std::size_t bytes)
    : gpu_(std::move(gpu)), address_(address), bytes_(bytes) {
  if (bytes > kMaxBytes) {
    throw std::invalid_argument("NETFOLD_NCCL_CUDA=staged takes regions of up to " + std::to_string(kMaxBytes) +
                                " bytes of a GPU's memory, not " + std::to_string(bytes));
  }
  const Entered entered(*gpu_->process_, *gpu_->driver_);
  const std::lock_guard lock(gpu_->mutex_);
  const auto kept = gpu_->unused_.lower_bound(bytes);
  if (kept != gpu_->unused_.end() && kept->first / 2 <= bytes) {
    std::tie(room_, memory_) = *kept;
    gpu_->unused_.erase(kept);
  } else {
    room_ = bytes;
    memory_ = gpu_->process_->new_pinned(bytes);
  }
}

Mirror::~Mirror() {
  if (is_abandoned_) return;
  const std::lock_guard lock(gpu_->mutex_);
  gpu_->unused_.emplace(room_, memory_);
}

std::byte* Mirror::at(std::uint64_t address, std::size_t bytes) const {
  if (address < address_ || address - address_ > bytes_ || bytes > bytes_ - (address - address_)) {
    throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes is not in the " +
                                std::to_string(bytes_) + " bytes of a GPU's memory that were registered");
  }
  return memory_ + (address - address_);
}

std::shared_ptr<const device::Event> Mirror::to_host(std::uint64_t address, std::size_t bytes) {
  std::byte* memory = at(address, bytes);
  return begin(gpu_->out_, [&] { gpu_->driver_->copy_to_host(gpu_->out_, memory, address, bytes); });
}

std::shared_ptr<const device::Event> Mirror::to_gpu(std::uint64_t address, std::size_t bytes) {
  const std::byte* memory = at(address, bytes);
  return begin(gpu_->in_, [&] { gpu_->driver_->copy_to_device(gpu_->in_, address, memory, bytes); });
}

template <class Copy>
std::shared_ptr<const device::Event> Mirror::begin(device::StreamHandle stream, Copy copy) {
  const Entered entered(*gpu_->process_, *gpu_->driver_);
  try {
    copy();
    return gpu_->driver_->record(stream);
  } catch (const device::CudaError&) {
    abandon();  // a copy may be under way that no event shows
    throw;
  }
}

bool Mirror::passed(const device::Event& copied) const {
  const Entered entered(*gpu_->process_, *gpu_->driver_);
  return copied.passed();
}

void StagedMessage::fetch(std::size_t bytes) {
  copied_ = mirror_->to_host(address_, bytes);
  copied_until_ns_ = transport::now_ns() + kCopyNs;
}

void StagedMessage::bring(std::size_t bytes) {
  if (bytes > 0) {
    copied_ = mirror_->to_gpu(address_, bytes);
    copied_until_ns_ = transport::now_ns() + kCopyNs;
  }
  is_awaited_ = false;
}

bool StagedMessage::is_copying() {
  if (copied_ == nullptr) return false;
  if (mirror_->passed(*copied_)) {
    copied_ = nullptr;
  } else if (transport::now_ns() >= copied_until_ns_) {
    throw device::CudaError(
        "the GPU has not copied a message after 10 s, so that other work holds it or it has failed; without "
        "NETFOLD_NCCL_CUDA=staged NCCL uses the host's memory, and needs no copy");
  }
  return copied_ != nullptr;
}

std::shared_ptr<Gpu> Gpus::of(std::uint64_t address) {
  auto driver = process_->driver_of(address);
  const std::lock_guard lock(mutex_);
  auto& found = all_[driver];
  if (found == nullptr) found = std::make_shared<Gpu>(process_, std::move(driver));
  return found;
}

}  // namespace netfold::nccl
