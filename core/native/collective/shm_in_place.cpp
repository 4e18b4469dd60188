#include "shm_in_place.hpp"

#include <netfold/kernels/copy.hpp>

#include <algorithm>

namespace netfold::collective {

using Access = transport::PeerMemory::Access;

void ShmInPlace::choose_mode(const Buffer& tensor, std::size_t number, bool whole) {
  mode_ = Mode::not_in_place;
  for (int position = 0; position < size_; ++position) {
    const Announcement& announcement = position == self_ ? own_ : others_[index(position)];
    if (announcement.refers == Refers::not_at_all) return;
  }
  mode_ = Mode::working;
  for (int position = 0; position < size_ && !failure_; ++position) {
    Tensor theirs;
    if (position == self_) {
      theirs.data = tensor.data;
      if (own_.refers == Refers::to_addresses) mode_ = Mode::telling_access;
    } else if (others_[index(position)].refers == Refers::to_regions) {
      theirs.data = referred(position, number, tensor.bytes);
    } else {
      theirs.address = referred_address(position, number);
      mode_ = Mode::telling_access;
    }
    tensors_.push_back(theirs);
  }
  const std::size_t share = share_bytes(tensor.bytes);
  first_ = whole ? 0 : std::min(tensor.bytes, share * index(self_));
  end_ = whole ? tensor.bytes : std::min(tensor.bytes, first_ + share);
  chunk_bytes_ = mode_ == Mode::telling_access ? node_.bounce_bytes() : part_bytes_;
  if (mode_ == Mode::telling_access && !failure_) {
    const std::optional<bool> can = try_access();
    if (can) tell_access(*can);
  }
}

// Whether this rank can read both ends of its part of every tensor. Empty, with `failure_`, where a rank has ended. A
// later refusal fails the call, since other parts are overwritten by then.
std::optional<bool> ShmInPlace::try_access() {
  if (first_ == end_) return true;
  if (!begin_use_of_all()) return {};
  bool can = true;
  for (int position = 0; position < size_ && can && !failure_; ++position) {
    const Tensor& theirs = tensors_[index(position)];
    if (theirs.data != nullptr) continue;
    for (const std::size_t at : {first_, end_ - 1}) {
      std::byte value{};
      const Access got = node_.memory()->read(position, &value, theirs.address + at, 1);
      if (got == Access::gone) lose(position);
      can &= got == Access::all;
    }
  }
  node_.end_use_of_all();
  if (failure_) return {};
  return can;
}

bool ShmInPlace::read_chunk(int position, std::byte* into, std::size_t bytes, bool streams) {
  const Tensor& theirs = tensors_[index(position)];
  if (theirs.data == nullptr) {
    return check(node_.memory()->read(position, into, theirs.address + first_, bytes), position, "read");
  }
  kernels::copy(into, theirs.data + first_, bytes, streams);
  return true;
}

bool ShmInPlace::write_chunk(int position, const std::byte* from, std::size_t bytes, bool streams) {
  const Tensor& theirs = tensors_[index(position)];
  if (theirs.data == nullptr) {
    return check(node_.memory()->write(position, theirs.address + first_, from, bytes), position, "write");
  }
  kernels::copy(theirs.data + first_, from, bytes, streams);
  return true;
}

bool ShmInPlace::check(Access access, int position, const char* what) {
  if (access == Access::all) return true;
  if (access == Access::gone) {
    lose(position);
  } else {
    failure_ = {Failure::Kind::system, mesh_.rank(),
                "rank " + std::to_string(mesh_.rank()) + " cannot " + what + " the tensor of rank " +
                    std::to_string(node_.rank(position)) +
                    " any more; has that process changed its permissions or its mappings during the operation? "
                    "NETFOLD_SINGLE_COPY=off does without"};
  }
  return false;
}

bool ShmInPlace::advance_in_place() {
  if (mode_ == Mode::telling_access) {
    const std::optional<bool> can = access_of_all();
    if (can) mode_ = *can ? Mode::working : Mode::not_in_place;
    return can.has_value();
  }
  if (mode_ == Mode::working && first_ < end_) {
    const std::size_t bytes = std::min(chunk_bytes_, end_ - first_);
    if (!begin_use_of_all()) return false;
    const bool worked = work_on(bytes);
    node_.end_use_of_all();
    if (worked) first_ += bytes;
    return worked;
  }
  if (mode_ == Mode::working) {
    mode_ = Mode::waiting;
    publish(kEnds, 1);
  }
  if (mode_ == Mode::done) return false;
  // Other ranks read and write this rank's tensor until they publish the end of their part.
  for (int position = 0; position < size_; ++position) {
    if (position != self_ && published(kEnds, position) == 0) return false;
  }
  mode_ = Mode::done;
  return true;
}

bool ShmInPlace::waits_in_place_for(int position) const {
  return mode_ == Mode::telling_access ? !told_access(position) : published(kEnds, position) == 0;
}

}  // namespace netfold::collective
