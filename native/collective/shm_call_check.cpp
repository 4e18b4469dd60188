#include <netfold/collective/shm_call_check.hpp>

namespace netfold::collective {

ShmCallCheck::ShmCallCheck(const Call& call, transport::Mesh& mesh, transport::ShmNode& node,
                           std::unique_ptr<Algorithm> algorithm)
    : ShmCollective(call, mesh, node), algorithm_(std::move(algorithm)) {}

Progress ShmCallCheck::poll(std::int64_t now_ns) {
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

void ShmCallCheck::wait_for(WaitSet& set) const {
  if (!is_posted()) return ShmCollective::wait_for(set);
  algorithm_->wait_for(set);
  wait_for_check(set);
}

std::vector<int> ShmCallCheck::awaited() const {
  return is_posted() ? algorithm_->awaited() : ShmCollective::awaited();
}

bool ShmCallCheck::awaited_may_wait() const {
  return is_posted() ? algorithm_->awaited_may_wait() : ShmCollective::awaited_may_wait();
}

}  // namespace netfold::collective
