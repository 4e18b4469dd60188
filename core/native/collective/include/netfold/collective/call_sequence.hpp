// A call that runs as a sequence of calls, each by an algorithm of its own: what Quantised and Hierarchical share.
#pragma once

#include <netfold/collective/algorithm.hpp>

#include <memory>

namespace netfold::collective {

class CallSequence : public Algorithm {
 public:
  Progress poll(std::int64_t now_ns) final {
    for (bool moved = false;; moved = true) {
      if (step_ != nullptr) {
        const Progress progress = step_->poll(now_ns);
        if (progress == Progress::failed) return fail(step_->failure());
        if (progress != Progress::done) return moved ? Progress::moved : progress;
        counts_ += step_->counts();
        end_step(*step_);
        step_.reset();
      }
      if (!start_next()) return failure_ ? Progress::failed : Progress::done;
      if (step_ == nullptr) return Progress::moved;
    }
  }
  void wait_for(WaitSet& set) const final {
    if (step_ != nullptr) step_->wait_for(set);
  }
  std::vector<int> awaited() const final { return step_ != nullptr ? step_->awaited() : std::vector<int>{}; }

 protected:
  // Starts the next step: sets step_, or leaves it null after a slice (slice.hpp) of a pass of its own. False: no step
  // is left, or failure_ is set.
  virtual bool start_next() = 0;
  virtual void end_step(const Algorithm&) {}

  Call step_call_;  // what step_ borrows
  std::unique_ptr<Algorithm> step_;
};

}  // namespace netfold::collective
