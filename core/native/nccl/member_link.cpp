#include "member_link.hpp"

#include <stdexcept>
#include <utility>

namespace netfold::nccl {
namespace {

// As engine::Group counts them.
int lane_of(int rail) {
  constexpr std::array kLanes{0, 2, 1};
  return kLanes.at(static_cast<std::size_t>(rail));
}

}  // namespace

void MemberLink::serve(const std::shared_ptr<engine::Group>& group) {
  {
    const std::lock_guard lock(mutex_);
    group_ = group;
    is_served_ = true;
  }
  on_broken_();  // one may have broken before
}

void MemberLink::note_broken(int rail) {
  std::int64_t none = 0;
  broken_since_ns_[static_cast<std::size_t>(rail)].compare_exchange_strong(none, transport::now_ns());
  on_broken_();
}

std::shared_ptr<engine::Group> MemberLink::group() {
  const std::lock_guard lock(mutex_);
  return group_.lock();
}

std::optional<Reconnectable::Broken> MemberLink::with_time(int rail,
                                                           const std::optional<engine::Group::Broken>& broken) {
  if (!broken) return std::nullopt;
  auto& since_ns = broken_since_ns_[static_cast<std::size_t>(rail)];
  std::int64_t none = 0;
  since_ns.compare_exchange_strong(none, transport::now_ns());
  return Broken{broken->received, broken->reconnects, since_ns};
}

std::optional<Reconnectable::Broken> MemberLink::broken(int rail) {
  if (broken_since_ns_[static_cast<std::size_t>(rail)] == 0) return std::nullopt;  // the driver need not be asked
  const auto group = this->group();
  return group == nullptr ? std::nullopt : with_time(rail, group->broken(lane_of(rail), peer_, 0));
}

bool MemberLink::is_over() {
  const auto group = this->group();
  const std::lock_guard lock(mutex_);
  return is_served_ && (group == nullptr || group->failure());
}

std::optional<Reconnectable::Broken> MemberLink::disconnect(int rail, int reconnects) {
  const auto group = this->group();
  if (group == nullptr) throw std::runtime_error("its communicator is not there yet");
  return with_time(rail, group->disconnect(lane_of(rail), peer_, 0, reconnects));
}

bool MemberLink::reconnect(int rail, int reconnects, transport::Fd socket, const Agreed& agreed) {
  const auto group = this->group();
  if (group == nullptr) return false;
  auto& since_ns = broken_since_ns_[static_cast<std::size_t>(rail)];
  const std::int64_t before_ns = since_ns.exchange(0);  // before, since the new socket may break at once
  if (group->reconnect(lane_of(rail), peer_, 0, reconnects, std::move(socket), agreed.received, agreed.secrets)) {
    return true;
  }
  std::int64_t none = 0;
  since_ns.compare_exchange_strong(none, before_ns);
  return false;
}

void MemberLink::give_up(int rail, int reconnects, const std::string& why) {
  if (const auto group = this->group()) group->give_up(lane_of(rail), peer_, 0, reconnects, why, false);
}

}  // namespace netfold::nccl
