// The connections between this rank of a collective communicator and another one, as the endpoint makes them again.
#pragma once

#include <netfold/engine/group.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "reconnectable.hpp"

namespace netfold::nccl {

class MemberLink final : public Reconnectable {
 public:
  // By number. Only the links of rank 0 have the last.
  enum Purpose : int { kMesh, kFallback, kToFirst, kPurposes };

  // on_broken: called when a connection is found to be broken, also by the group's driver.
  MemberLink(Id id, bool has_dialled, int peer, int rails, std::function<void()> on_broken)
      : id_(id),
        has_dialled_(has_dialled),
        peer_(peer),
        name_("rank " + std::to_string(peer)),
        rails_(rails),
        on_broken_(std::move(on_broken)) {}

  // From now on the group has the connections. Before that none is made again.
  void serve(const std::shared_ptr<engine::Group>& group);
  void note_broken(int rail);

  const Id& id() const override { return id_; }
  bool has_dialled() const override { return has_dialled_; }
  const std::string& peer() const override { return name_; }
  int rails() const override { return rails_; }
  bool is_over() override;
  std::optional<Broken> broken(int rail) override;
  std::optional<Broken> disconnect(int rail, int reconnects) override;
  bool reconnect(int rail, int reconnects, transport::Fd socket, const Agreed& agreed) override;
  void give_up(int rail, int reconnects, const std::string& why) override;
  // The end that notices a break asks the other one.
  void look() override {}
  bool has_arrived() override { return true; }

 private:
  std::shared_ptr<engine::Group> group();
  std::optional<Broken> with_time(int rail, const std::optional<engine::Group::Broken>& broken);

  const Id id_;
  const bool has_dialled_;
  const int peer_;
  const std::string name_;
  const int rails_;
  const std::function<void()> on_broken_;
  std::array<std::atomic<std::int64_t>, kPurposes> broken_since_ns_{};  // 0: it is not
  std::mutex mutex_;
  std::weak_ptr<engine::Group> group_;
  bool is_served_ = false;
};

}  // namespace netfold::nccl
