// One operation over several channels: of several switches side by side, or of the threads of one.
//
// Every block of the call is cut into as many parts as there are channels, and each channel carries its part as a call
// of its own kind: parts of an all_gather are all_gathers of smaller blocks. A small call goes whole over one channel,
// another one each time. What a rank sends and what a result costs is as over one channel; each channel has a window, a
// port and, at its switch, a thread for itself.
#pragma once

#include <netfold/collective/algorithm.hpp>

#include <functional>
#include <memory>
#include <vector>

namespace netfold::collective {

class Sharded final : public Algorithm {
 public:
  // Makes what carries a call over channel `shard`; the call is borrowed.
  using Make = std::function<std::unique_ptr<Algorithm>(const Call& call, std::size_t shard)>;
  // Fewer bytes a part are not worth a part.
  static constexpr std::size_t kLeastPartBytes = 64 << 10;

  Sharded(const Call& call, std::size_t shards, const Make& make);
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override;
  std::vector<int> awaited() const override;
  bool awaited_may_wait() const override;

 private:
  struct Part {
    std::unique_ptr<Call> call;
    std::unique_ptr<Algorithm> algorithm;
    bool done = false;
  };
  std::vector<Part> parts_;
};

}  // namespace netfold::collective
