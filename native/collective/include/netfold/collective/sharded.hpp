// One operation over several ways at once: channels of several switches side by side, or of the threads of one; or
// these and a host algorithm (split.hpp).
//
// Every block of the call is cut into a part for each way, and each way carries its part as a call of the same kind:
// parts of an all_gather are all_gathers of smaller blocks. What a rank sends and what a result costs is as over one
// way; each channel has a window, a port and, at its switch, a thread for itself.
#pragma once

#include <netfold/collective/algorithm.hpp>

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace netfold::collective {

class Sharded final : public Algorithm {
 public:
  // Makes what carries a call over `way`, and may say so in it; the call is borrowed.
  using Make = std::function<std::unique_ptr<Algorithm>(Call& call, std::size_t path)>;
  // Fewer bytes a part are not worth a part.
  static constexpr std::size_t kLeastPartBytes = 64 << 10;

  // Equal parts. A small call goes whole by one way, another one each time.
  Sharded(const Call& call, std::size_t paths, const Make& make);
  // A part for each way in proportion to its weight, none where that is 0. Precondition: one is above 0.
  Sharded(const Call& call, std::span<const std::uint32_t> weights, const Make& make);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

  // What a way carries. settled_at_mark: bytes of its `algorithm` when mark() was last called while it was under way.
  struct Part {
    std::size_t path = 0;
    std::unique_ptr<Call> call;
    std::unique_ptr<Algorithm> algorithm;
    bool done = false;
    bool held = false;
    std::int64_t done_ns = 0;
    std::uint64_t settled_at_mark = 0;
  };
  const std::vector<Part>& parts() const { return parts_; }
  std::int64_t began_ns() const { return began_ns_; }
  // Notes how far each part that is under way has come.
  void mark();
  // Whether the part of this way has to wait.
  void hold(std::size_t path, bool held);

 private:
  void add(const Call& call, std::size_t path, std::uint64_t first, std::uint64_t end, std::uint64_t whole,
           const Make& make);

  std::vector<Part> parts_;
  std::int64_t began_ns_ = -1;
};

}  // namespace netfold::collective
