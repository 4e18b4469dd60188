#include <netfold/collective/shared_notice.hpp>

namespace netfold::collective {

SharedNotice::SharedNotice(const Call& call, transport::Mesh& mesh, transport::SharedNode& node,
                           std::unique_ptr<Algorithm> algorithm)
    : SharedCall(call, mesh, node), algorithm_(std::move(algorithm)) {}

Progress SharedNotice::poll(std::int64_t now_ns) {
  if (!is_posted()) {
    const Progress posted = SharedCall::poll(now_ns);
    if (posted == Progress::failed || !is_posted()) return posted;
  }
  Progress progress = algorithm_ == nullptr ? Progress::done : algorithm_->poll(now_ns);
  if (algorithm_ != nullptr) {
    wire_bytes_ = algorithm_->wire_bytes();
    retransmissions_ = algorithm_->retransmissions();
    slowest_rank_ = algorithm_->slowest_rank();
  }
  if (progress == Progress::failed) return fail(algorithm_->failure());
  if (progress == Progress::idle) {
    look_at_posts();
    if (!failure_) look_now_and_then(now_ns);
  }
  if (failure_) return Progress::failed;
  if (progress != Progress::done) return progress;
  done_ = true;
  return SharedCall::poll(now_ns);
}

void SharedNotice::wait_for(WaitSet& set) const {
  if (!is_posted()) return SharedCall::wait_for(set);
  if (algorithm_ != nullptr) algorithm_->wait_for(set);
  wait_to_look(set);
}

std::vector<int> SharedNotice::awaited() const {
  return is_posted() && algorithm_ != nullptr ? algorithm_->awaited() : SharedCall::awaited();
}

bool SharedNotice::awaited_may_wait() const {
  return is_posted() && algorithm_ != nullptr ? algorithm_->awaited_may_wait() : SharedCall::awaited_may_wait();
}

}  // namespace netfold::collective
