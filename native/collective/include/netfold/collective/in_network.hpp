// Collectives inside the network: one operation on a channel to a switch.
//
// One step. Bytes sent by a rank for n bytes of tensor: n and a header a packet, for any number of ranks (a ring's
// all_reduce sends 2n(P-1)/P). contribution_map.hpp says what each operation is to the switch.
#pragma once

#include <netfold/collective/channel.hpp>

namespace netfold::collective {

class InNetwork final : public Algorithm {
 public:
  // Preconditions: channel.can_start(), and the map has elements. Borrows all three.
  InNetwork(const Call& call, Channel& channel, const ContributionMap& map);
  ~InNetwork() override;
  int token() const { return token_; }
  Progress poll(std::int64_t now_ns) override;
  void wait_for(WaitSet& set) const override { channel_.wait_for(set); }
  std::vector<int> awaited() const override { return {}; }
  std::uint64_t settled_bytes() const override { return channel_.active(token_).result_bytes; }

 private:
  Channel& channel_;
  int token_;
};

}  // namespace netfold::collective
