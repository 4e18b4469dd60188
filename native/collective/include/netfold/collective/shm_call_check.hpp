// Checks a call that goes over the mesh in a group whose ranks share memory. It posts the call's header in memory like
// a shared-memory call, and compares other ranks' posts while the call waits. So where one rank of a host is in a call
// over sockets and another rank in a call through memory, both report the mismatch at once.
#pragma once

#include <netfold/collective/shm_collective.hpp>

#include <memory>

namespace netfold::collective {

class ShmCallCheck final : public ShmCollective {
 public:
  // `algorithm`: the call over the mesh.
  ShmCallCheck(const Call& call, transport::Mesh& mesh, transport::ShmNode& node, std::unique_ptr<Algorithm> algorithm);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  bool needs_post(int) const override { return false; }
  void write_post(std::byte*) override {}
  std::uint64_t expected_bytes(int) const override { return 0; }
  bool advance() override { return false; }
  bool done() const override { return done_; }
  bool waits_for(int) const override { return false; }
  bool reads(Stream, int) const override { return false; }

  const std::unique_ptr<Algorithm> algorithm_;
  bool done_ = false;
};

}  // namespace netfold::collective
