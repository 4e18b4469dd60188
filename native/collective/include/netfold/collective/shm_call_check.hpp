// A call that goes over the mesh, in a group some ranks of which share memory: it posts its header there like any other
// call, and looks at the others' posts while it waits. So of two ranks of a host that are in different calls, one at a
// socket and one in memory, both hear of it at once.
#pragma once

#include <netfold/collective/shm_collective.hpp>

#include <memory>

namespace netfold::collective {

class ShmCallCheck final : public ShmCollective {
 public:
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

  std::unique_ptr<Algorithm> algorithm_;  // null where there is nothing to do
  bool done_ = false;
};

}  // namespace netfold::collective
