// The work of a collective communicator's ranks together after its first operation: recovery from a lost switch, and the
// end.
//
// Messages go between rank 0 and each other rank, by sends and receives of the communicator's engine::Group: outside the
// order of collectives, so that a rank answers whatever it waits for. A receive is always posted, so a rank that dies
// fails the group on every rank, once its connections cannot be made again any more.
//
//   lost     to rank 0    this rank has lost the switch
//   freeze   from rank 0  accept nothing from the switch from here on
//   frozen   to rank 0    the results that this rank has
//   give     from rank 0  send results that you kept: rank 0 lacks them
//   results  both ways    packets of results; the last message of several says so
//   go       from rank 0  go on by host algorithms; these chunks you must have by now
//   closing  to rank 0    this rank has no operation under way and will start none
//   closed   from rank 0  that holds for all ranks
//
//   rank 0   watching  --a rank has lost the switch-->       freezing    sends freeze
//            freezing  --all have frozen-->                  gathering   sends give to ranks that have what it lacks
//            gathering --all results are here-->             down        sends each rank what that lacks, and go
//   other    watching  --freeze-->                           freezing    sends frozen
//            freezing  --go, and every named chunk is here-> down
//
// Why no sum is wrong, and no operation counts twice. Every rank is frozen before rank 0 plans, so the reports stay true.
// A result that any rank has reaches all: a switch's result never changes, and rank 0 has them all once it has gathered.
// collective/channel.hpp shows that they are still kept. What no rank has is reduced by host algorithms, the same
// elements on every rank: each compares its chunks with the plan first. collective/switch_path.hpp says how operations
// go on. Whether the switch was really lost does not matter. The communicator then stays without a switch.
//
// It is the agreement of netfold/communicator/recovery.py without its listeners and its way back to a switch.
#pragma once

#include <netfold/control/membership.hpp>
#include <netfold/engine/engine.hpp>
#include <netfold/transport/condition.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace netfold::nccl {

class Recovery : public std::enable_shared_from_this<Recovery> {
 public:
  static constexpr std::int64_t kTickNs = 50'000'000;

  // group: the membership's channel, of that generation, is its only one.
  Recovery(std::shared_ptr<engine::Group> group, std::unique_ptr<control::Membership> membership,
           std::uint64_t generation);

  // Begins to watch. The recovery then lives until `leave` returns.
  void start();
  // Waits, kCloseNs at most, until all ranks call this.
  void await_all();
  // Leaves the switch and ends the group.
  void leave();
  // Whether operations go through the switch.
  bool has_switch();

 private:
  friend class Watcher;
  static constexpr std::int64_t kRecoverNs = 30'000'000'000;
  static constexpr std::int64_t kCloseNs = 2'000'000'000;
  // A message: small enough to travel at once.
  static constexpr std::size_t kMessageBytes = 96 << 10;

  enum class Type : std::uint32_t { lost, freeze, frozen, give, results, go, closing, closed };
  struct Header {
    Type type = Type::lost;
    std::uint32_t bytes = 0;  // behind the header
    std::uint64_t base = 0;
    std::uint64_t end = 0;
    std::uint32_t promised = 0;
    std::uint32_t is_last = 0;
  };
  using Bits = std::vector<bool>;
  // One rank's, as it reported them.
  struct Held {
    std::uint64_t base = 0, end = 0;
    Bits chunks;  // from base on
    bool has(std::uint64_t chunk) const {
      return chunk < base || (chunk - base < chunks.size() && chunks[chunk - base]);
    }
  };
  enum class State { watching, freezing, gathering, down };
  using Packets = std::vector<std::vector<std::byte>>;

  bool is_first() const { return group_->rank() == 0; }
  // Called by the watcher.
  void operation_done(std::uint64_t id);
  void look(std::int64_t now_ns);

  // Under the lock.
  void post_receive(int peer);
  void send(int peer, Header header, std::span<const std::byte> bytes = {});
  void send_packets(int peer, const Packets& packets);
  void handle(int peer, const Header& header, std::span<const std::byte> bytes);
  void begin(const std::string& why);
  Held freeze();
  void plan();
  void distribute();
  void go_on(std::uint64_t base, std::uint64_t end, bool promised, const Bits& wanted);
  bool accept(const Packets& packets);
  Packets kept(std::uint64_t base, const Bits& chunks);
  void note_closing();
  void fail(const std::string& why);

  const std::shared_ptr<engine::Group> group_;
  const std::unique_ptr<control::Membership> membership_;
  const std::uint64_t generation_;
  const std::uint32_t window_;

  std::mutex mutex_;
  transport::Condition closed_;
  State state_ = State::watching;
  std::string why_;               // the switch is lost
  std::int64_t deadline_ns_ = 0;  // of a recovery
  struct Receive {
    int peer = 0;
    std::vector<std::byte> bytes;
    std::shared_ptr<engine::Operation> operation;
  };
  std::map<std::uint64_t, Receive> receives_;  // by operation
  struct Sent {
    std::vector<std::byte> bytes;
    std::shared_ptr<engine::Operation> operation;
  };
  std::vector<Sent> sends_;
  bool promised_ = false;
  std::map<int, Held> held_;  // rank 0's, by rank
  std::vector<int> giving_;   // rank 0's: ranks whose results are to come
  std::uint64_t base_ = 0, end_ = 0;
  Bits all_;                        // rank 0's: the chunks from base_ on that some rank has
  std::map<int, Packets> results_;  // that came so far, by rank
  int closing_ = 0;                 // ranks
  bool is_closing_ = false, is_closed_ = false;
};

}  // namespace netfold::nccl
