#include <netfold/collective/slice.hpp>

#include <cstring>

namespace netfold::collective {

void BlockCopies::add(const Buffer& to, const Buffer& from) {
  if (to.bytes > 0 && to.data != from.data) copies_.push_back({to, from.data});
}

void BlockCopies::add_own_block(const Call& call, int self) {
  const Buffer* from = call.given_to(self, self);
  const Buffer* to = call.taken_from(self, self);
  if (from != nullptr && to != nullptr) add(*to, *from);
}

bool BlockCopies::advance() {
  if (done()) return false;
  for (std::size_t left = kSliceBytes; left > 0 && !done();) {
    const Copy& copy = copies_[next_];
    const std::size_t bytes = std::min(left, copy.to.bytes - copied_);
    std::memcpy(copy.to.data + copied_, copy.from + copied_, bytes);
    left -= bytes;
    copied_ += bytes;
    if (copied_ < copy.to.bytes) break;
    copied_ = 0;
    ++next_;
  }
  return true;
}

}  // namespace netfold::collective
