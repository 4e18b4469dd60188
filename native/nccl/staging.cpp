#include "staging.hpp"

#include <algorithm>
#include <bit>

namespace netfold::nccl {

using Entered = device::CudaProcess::Entered;

Staging::Staging(std::shared_ptr<device::CudaProcess> process, std::shared_ptr<device::CudaDriver> driver)
    : process_(std::move(process)), driver_(std::move(driver)) {
  const Entered entered(*process_, *driver_);
  out_ = process_->new_stream();
  in_ = process_->new_stream();
}

Staging::Message Staging::fetch(std::uint64_t address, std::size_t bytes) {
  Message message = expect(address, bytes);
  message.is_awaited_ = false;
  const Entered entered(*process_, *driver_);
  driver_->copy_to_host(out_, message.memory_, address, bytes);
  message.copied_ = driver_->record(out_);
  return message;
}

Staging::Message Staging::expect(std::uint64_t address, std::size_t bytes) {
  Message message;
  message.room_ = std::max(kLeastBytes, std::bit_ceil(bytes));
  message.memory_ = memory_of(message.room_);
  message.of_ = shared_from_this();
  message.address_ = address;
  message.is_awaited_ = true;
  return message;
}

// Of the oldest only: copies of one direction end in their order.
std::byte* Staging::memory_of(std::size_t room) {
  const Entered entered(*process_, *driver_);
  const std::lock_guard lock(mutex_);
  auto& unused = unused_[room];
  if (unused.empty() || (unused.front().copied != nullptr && !unused.front().copied->passed())) {
    return process_->new_pinned(room);
  }
  std::byte* memory = unused.front().memory;
  unused.pop_front();
  return memory;
}

Staging::Message& Staging::Message::operator=(Message&& other) noexcept {
  give_back();
  of_ = std::move(other.of_);
  address_ = other.address_;
  memory_ = std::exchange(other.memory_, nullptr);
  room_ = other.room_;
  is_awaited_ = other.is_awaited_;
  copied_ = std::move(other.copied_);
  return *this;
}

bool Staging::Message::is_copying() {
  if (copied_ == nullptr) return false;
  const Entered entered(*of_->process_, *of_->driver_);
  if (!copied_->passed()) return true;
  copied_ = nullptr;
  return false;
}

void Staging::Message::bring(std::size_t bytes) {
  if (bytes > 0) {
    const Entered entered(*of_->process_, *of_->driver_);
    of_->driver_->copy_to_device(of_->in_, address_, memory_, bytes);
    copied_ = of_->driver_->record(of_->in_);
  }
  is_awaited_ = false;
}

void Staging::Message::give_back() {
  const auto of = std::move(of_);
  if (of == nullptr) return;
  const std::lock_guard lock(of->mutex_);
  of->unused_[room_].push_back({memory_, std::move(copied_)});
}

std::shared_ptr<Staging> Gpus::of(std::uint64_t address) {
  auto driver = process_->driver_of(address);
  const std::lock_guard lock(mutex_);
  auto& found = all_[driver];
  if (found == nullptr) found = std::make_shared<Staging>(process_, std::move(driver));
  return found;
}

}  // namespace netfold::nccl
