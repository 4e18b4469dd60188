// The parts of a large all_reduce that go through each switch and by a host algorithm, at the same time.
//
// Each path has two rates, in bytes of tensor a second: beside the other paths, and alone (a switch: beside the other
// switches, without the host algorithm). If each path has a part in proportion to its rate beside the others, all end
// at once, and together they reach the sum of these rates. The paths go together where that sum is above the rate of
// the switches alone and above that of the host algorithm alone; otherwise the faster of the two does everything. So a
// switch with a port for each worker gets everything, and a switch whose link is slower than a rank's gets a little.
// None of this depends on how two flows share a link.
//
// Until operations have shown other rates (`learn`): with R_i the rate at which switch i returns results and L the rate
// of a rank's link, the switches use sum(R_i) of the link, or half of it where that sum reaches L, and a ring the rest.
//
// Some operations are trials, each time kTrialGrowth times as many operations apart. While the paths go together, the
// switches get in turn more, then less, then nothing. So one kind of path ends first, and its rest shows the other's
// rate alone. While the host algorithm does everything, a trial lets the paths go together: a small part through a
// switch would show its latency rather than its rate. Rates that move a part by a sixteenth of the whole restart the
// trials. The rest of a host algorithm can only raise its known rate alone: its connections need some time to use the
// whole link. A lower rate is learned when the host algorithm does everything; a rate that is too high leads to that,
// at the cost of one operation in a ring's time.
//
// The median of the last three measurements of a rate counts: a pause of one rank or one connection makes every rate of
// an operation low. A rate that is more than twice the known one counts at once, since nothing makes a path faster than
// it is.
//
// A value: no clock, no socket; integers only, so that every rank computes the same parts from the same numbers.
#pragma once

#include <algorithm>
#include <array>
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
  // Operations before the first trial, and at most between two trials.
  static constexpr std::uint32_t kFirstTrial = 8;
  static constexpr std::uint32_t kTrialGrowth = 2;
  static constexpr std::uint32_t kLastTrial = 512;
  // A trial moves 1 / kTrialPart of a switch's part to the other path, and kWhole / kLeastPart at least.
  static constexpr std::uint32_t kTrialPart = 4;
  // One operation in so many updates the rates; so do the first ones, those after a part moved or a rate was in doubt, and
  // trials.
  static constexpr std::uint64_t kEvery = 8;
  // Smaller operations give no rates: they are mostly latency, and fit whole into buffers on the path.
  static constexpr std::size_t kLearnBytes = 1 << 20;

  // switches, host, link: rates in bytes per second of each switch, a host algorithm and a rank's link; above 0.
  // fixed: parts that never change, by switch, at most kWhole in all; the host algorithm has the rest. Or empty.
  // Precondition: there is at least one switch.
  Shares(std::vector<std::uint64_t> switches, std::uint64_t host, std::uint64_t link, std::vector<std::uint32_t> fixed);

  // Parts of the next operation: of each switch and, last, of the host algorithm; kWhole in all.
  std::vector<std::uint32_t> parts() const;
  // Whether the ranks agree on the rates of the next operation.
  bool learns() const {
    return fixed_.empty() && (operations_ < learn_until_ || operations_ % kEvery == 0 || is_trial());
  }
  // The same of an operation of that size. The operation after it is cut by these rates.
  bool learns_from(std::size_t bytes) const { return bytes >= kLearnBytes && learns(); }
  // Whether the next operation is a trial.
  bool is_trial() const { return fixed_.empty() && operations_ >= next_trial_; }
  // Parts of an operation that is no trial.
  std::vector<std::uint32_t> balanced() const;

  // The rates of a path in bytes per second. 0: it had no part, or its time was too short to measure.
  struct Rates {
    std::uint64_t beside = 0;  // beside the other paths
    std::uint64_t alone = 0;
  };
  // Counts an operation that used `parts()`, with the rates that all ranks agreed on: of each switch and, last, of the
  // host algorithm.
  void learn(std::span<const Rates> paths);
  // Counts an operation without rates.
  void skip();

  // The known rates, in the same order.
  std::vector<Rates> paths() const;
  std::uint64_t operations() const { return operations_; }

 private:
  // Parts in proportion to the rates beside each other, whether that is faster or not.
  std::vector<std::uint32_t> joined() const;

  // The last measurements of a rate.
  class Samples {
   public:
    static constexpr std::size_t kKept = 3;
    // Forgets what was measured.
    void assume(std::uint64_t rate) {
      last_.fill(rate);
      added_ = 0;
    }
    // The first one replaces what was assumed.
    void add(std::uint64_t rate) {
      if (added_ == 0) last_.fill(rate);
      last_[added_++ % kKept] = rate;
    }
    std::uint64_t median() const {
      auto sorted = last_;
      std::sort(sorted.begin(), sorted.end());
      return sorted[kKept / 2];
    }

   private:
    std::array<std::uint64_t, kKept> last_ = {};
    std::size_t added_ = 0;
  };
  struct PathSamples {
    Samples beside, alone;
  };

  std::vector<PathSamples> samples_;  // the median of each counts
  std::vector<std::uint32_t> fixed_;
  std::uint64_t operations_ = 0;
  std::uint64_t learn_until_ = kEvery;
  std::size_t repeated_ = 0;  // measurements in a row that were in doubt
  std::uint64_t trials_ = 0;
  std::uint64_t next_trial_ = kFirstTrial;
  std::uint64_t between_trials_ = kFirstTrial;
};

}  // namespace netfold::collective
