// One operation over several paths at once: channels of several switches, or of the threads of one switch; or these and
// a host algorithm (split.cpp).
//
// Every block of the call is cut into a part for each path. Each path carries its part as a call of the same kind:
// parts of an all_gather are all_gathers of smaller blocks. A rank sends as many bytes, in as many steps, as over one
// path. Each channel has a window, a port and, at its switch, a thread of its own.
#pragma once

#include <netfold/collective/algorithm.hpp>

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace netfold::collective {

class Sharded final : public Algorithm {
 public:
  // Makes the algorithm that carries a call over `path`. It may set the call's algorithm; the call is borrowed.
  using Make = std::function<std::unique_ptr<Algorithm>(Call& call, std::size_t path)>;
  // Smaller parts cost more than they gain.
  static constexpr std::size_t kLeastPartBytes = 64 << 10;

  // Equal parts. A small call goes whole over one path; successive calls take the paths in turn.
  Sharded(const Call& call, std::size_t paths, const Make& make);
  // Parts in proportion to the paths' weights; no part where the weight is 0. Precondition: a weight is above 0.
  Sharded(const Call& call, std::span<const std::uint32_t> weights, const Make& make);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

  // The part that a path carries.
  struct Part {
    std::size_t path = 0;
    std::unique_ptr<Call> call;
    std::unique_ptr<Algorithm> algorithm;
    bool done = false;
    bool held = false;
    std::int64_t done_ns = 0;
    std::uint64_t settled_at_mark = 0;  // settled_bytes() of the algorithm at the last mark() before it was done
  };
  const std::vector<Part>& parts() const { return parts_; }
  std::int64_t began_ns() const { return began_ns_; }
  // Records the settled bytes of each part that is not done.
  void mark();
  // Stops the part of a path, or lets it run again.
  void hold(std::size_t path, bool held);

 private:
  void add(const Call& call, std::size_t path, std::uint64_t first, std::uint64_t end, std::uint64_t whole,
           const Make& make);

  std::vector<Part> parts_;
  std::int64_t began_ns_ = -1;
};

}  // namespace netfold::collective
