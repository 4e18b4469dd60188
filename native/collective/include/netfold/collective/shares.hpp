// What part of a large all_reduce goes through each switch, and what part by a host algorithm, at the same time.
//
// What is known of each way are two rates, in bytes of tensor a second: beside the others, and alone (of a switch:
// beside other switches, without the host algorithm). Together the ways do the sum of their rates beside each other, if
// each has a part in that proportion, so that all end at once. They go together where that is more than the switches do
// alone, and more than the host algorithm does alone; else the quicker of the two does all of it. So a switch with a
// port a worker gets everything, one whose link is slower than a rank's a little, and none of this depends on how two
// flows happen to share a link.
//
// Until operations have shown otherwise (`learn`): with R_i what switch i gives back, H a ring's rate and L a rank's
// link, the switches have sum(R_i) of the link, a half of it at most, and the ring the rest.
//
// Now and then, kTrialGrowth times as many operations apart each time, an operation is a trial: the switches get more,
// the next time less, then nothing; so one kind of way ends first, and the rest shows the other's rate alone. A rate
// that changed by a fifth begins these anew. A host algorithm's rest may only show that it is quicker alone than was
// known: its connections need a while to find out that the link is theirs. That it is slower is learned when it does
// all, which is what a rate that is too high leads to, and costs one operation of a ring's time.
//
// A value: no clock, no socket; integers only, so that every rank computes the same from the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace netfold::collective {

class Shares {
 public:
  // All parts together.
  static constexpr std::uint32_t kWhole = 4096;
  // A part below kWhole / kLeastPart costs more than it gains.
  static constexpr std::uint32_t kLeastPart = 32;
  static constexpr std::uint32_t kFirstTrial = 8;
  static constexpr std::uint32_t kTrialGrowth = 2;
  static constexpr std::uint32_t kLastTrial = 512;
  // Of a trial: one in so many of a switch's part goes to the other way, and kWhole / kLeastPart at least.
  static constexpr std::uint32_t kTrialPart = 4;
  // An operation that is learned from is one of so many, but for the first ones, those after a rate changed, and
  // trials.
  static constexpr std::uint64_t kEvery = 8;

  // Bytes a second of each switch, a host algorithm and a rank's link. `fixed`: parts that stay, by switch, kWhole at
  // most in all, the rest the host's; or empty. Preconditions: a switch at least; rates above 0.
  Shares(std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link, std::vector<std::uint32_t> fixed);

  // Of the next operation: each switch's part and, last, the host algorithm's; kWhole in all.
  std::vector<std::uint32_t> parts() const;
  // Whether the ranks are to agree on what the next operation did.
  bool learns() const {
    return fixed_.empty() && (operations_ < learn_until_ || operations_ % kEvery == 0 || is_trial());
  }
  // Whether that is a trial; and the parts of an operation that is none.
  bool is_trial() const { return fixed_.empty() && operations_ >= next_trial_; }
  std::vector<std::uint32_t> balanced() const;

  // What a way did in an operation that went by `parts()`, agreed on by all ranks: bytes a second, 0 where it had no
  // part, or too short a time to tell.
  struct Rates {
    std::uint64_t beside = 0;
    std::uint64_t alone = 0;
  };
  // Counts the operation. Of each switch and, last, the host algorithm.
  void learn(std::span<const Rates> paths);
  // The same of an operation that teaches nothing.
  void skip();

  // As they are known now, likewise.
  std::span<const Rates> paths() const { return paths_; }
  std::uint64_t operations() const { return operations_; }

 private:
  std::vector<Rates> paths_;
  std::vector<std::uint32_t> fixed_;
  std::uint64_t operations_ = 0;
  std::uint64_t learn_until_ = kEvery;
  std::uint64_t trials_ = 0;
  std::uint64_t next_trial_ = kFirstTrial;
  std::uint64_t between_trials_ = kFirstTrial;
};

}  // namespace netfold::collective
