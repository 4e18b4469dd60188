// Checks a call that goes over the mesh in a group whose ranks share memory. It posts the call's header in memory like
// a shared-memory call, and compares other ranks' posts while the call waits. So where one rank of a host is in a call
// over sockets and another rank in a call through memory, both report the mismatch at once.
#include <netfold/collective/shm_collective.hpp>

#include "algorithms.hpp"

namespace netfold::collective {
namespace {

class ShmCallCheck final : public ShmCollective {
 public:
  // `algorithm`: the call over the mesh.
  ShmCallCheck(const Call& call, transport::Mesh& mesh, transport::ShmNode& node, std::unique_ptr<Algorithm> algorithm)
      : ShmCollective(call, mesh, node), algorithm_(std::move(algorithm)) {}

  Progress poll(std::int64_t now_ns) override {
    if (!is_posted()) {
      const Progress posted = ShmCollective::poll(now_ns);
      if (posted == Progress::failed || !is_posted()) return posted;
    }
    const Progress progress = algorithm_->poll(now_ns);
    counts_ = algorithm_->counts();
    if (progress == Progress::failed) return fail(algorithm_->failure());
    if (progress == Progress::idle) {
      check_posts();
      if (!failure_) check_peers(now_ns);
    }
    if (failure_) return Progress::failed;
    if (progress != Progress::done) return progress;
    done_ = true;
    return ShmCollective::poll(now_ns);
  }

  void wait_for(WaitSet& set) const override {
    if (!is_posted()) return ShmCollective::wait_for(set);
    algorithm_->wait_for(set);
    await_posts();
    wait_for_check(set);
  }

  std::vector<int> awaited() const override { return is_posted() ? algorithm_->awaited() : ShmCollective::awaited(); }

  bool awaited_may_wait() const override {
    return is_posted() ? algorithm_->awaited_may_wait() : ShmCollective::awaited_may_wait();
  }

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

}  // namespace

std::unique_ptr<Algorithm> make_shm_call_check(const Call& call, const Paths& paths,
                                               std::unique_ptr<Algorithm> algorithm) {
  return std::make_unique<ShmCallCheck>(call, paths.mesh, *paths.node, std::move(algorithm));
}

}  // namespace netfold::collective
