// Exhaustive search of small scopes: every order of events that the production machines can meet.
//
// Theory of operation. A state is the switch's machine, every worker's machine with what was delivered to it, and the
// network as a set of packets. From each state every event is tried, breadth first, so the first broken promise found
// has the shortest trace there is.
//
//   network    A packet may be delivered at any time after it was sent, in any order. There are three views of it:
//     monotone It stays for ever. This holds every loss (it is never delivered), delay (later), reordering and
//              duplicate (again), all without bound: a run with any of them meets the same machines with fewer packets
//              in the network, so it is one of the runs searched. Corruption is a loss.
//     merged   Kept, and one state for all that have the same machines: its network has every packet that any of theirs
//              has. More packets can only do more, so nothing is missed; a trace may mix packets of several runs, so
//              what is found here is to be looked for once more with a monotone network. The largest scopes are for this.
//     exact    A delivery takes it away or leaves a copy, or it is lost, as a network really does. As many states as
//              there are subsets of packets: for scopes so small that the three can be compared.
//   time       A worker's clock may say anything. Workers count as equal that differ in clocks, packet numbers and estimates
//              alone: these decide which chunk is sent again, and when, and a chunk that is sent again is a packet that
//              is in the network already. This is checked at every state of a worker: each packet reaches it as it is,
//              and after each number of timers, with what they gave up sent again and not yet sent; all must become
//              the same, and what timers send must have been sent before.
//   sending    A worker sends as soon as it may: one that sends later is one whose packets arrive later.
//   foreign    The wire may carry another job's contributions and results, for every chunk and worker, from the start.
//   others     The last worker may call something else than the others do. Who hears of a mismatch ends, and takes and
//              sends nothing more; from then on every other worker of that generation may hear of it over the control
//              connection, and ends as well.
//   leaves     Workers may be below leaf switches, and these below the switch, which is then the root. A leaf sends its
//              sum when it is summed, and once more for each contribution that comes again; what its ParentSender sends
//              besides is a packet that is in the network already.
//   restart    The only fault with a bound. Of the group: the next epoch. Of the switch: a new incarnation, whose
//              epochs start from the first. The new switch machine is there at once, and each worker rejoins at any
//              later time; until then the old one goes on (admission promises more: all are gone before any starts).
//              Below leaves any of them may be the one that restarts, and what it knew is gone at once: it has a new
//              incarnation, and all others the next epoch. The other leaves rejoin at any later time, and a worker
//              when its leaf has.
//   numbers    Packets may have their numbers, and the switch and the leaves gap detection and senders of their own; a
//              NACK is then a packet like others. A socket refuses each packet so often that numbers lie far apart:
//              where that is eight, one later packet does what eight do. A packet that is sent again is another one,
//              so there is a bound: each timer rings, and each leaf is asked for sums once more, so many times. Clocks
//              stand still but when a timer rings. Nothing is left out of a worker's state then. A leaf's results from
//              the root follow each other by one: what its sender makes of skipped ones is a search of its own
//              (netfold/model_check/parent_sender.py). Not together with workers that call something else.
//
// Safety. What a worker is given is the exact sum of every worker's contribution to that chunk in that generation, once, and
// never of a chunk on which workers disagree. None is said to disagree that agrees, and none is told what it said
// itself. Contributions are such that no other subset, no double count, and no mixture of chunks or generations has the same
// sum: worker w's is a number in [1024, 2048), different for each chunk and generation, times 2^16w; two of them are already
// too much.
//
// With numbers: no packet has a number that another of its sender had; none is named as missing that has come, or that
// fewer than eight later ones passed over; whatever a NACK names, and has no result, is sent again at once, and
// without a timer nothing else is but what the result of a later one passed over, where a result had been skipped.
//
// Possibility. From every state reached there is a way, without a further fault, to where every worker has finished all
// operations, or, where workers disagree, has finished or ended. Unless the network is exact, that is asked of the
// machines with nothing in the network, since a packet more can only help (it can be left where it is): the hardest
// case, everything lost. With numbers, timers alone, as many as it takes, lead from there to the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace netfold::model_check {

inline constexpr std::uint16_t kMaxWorkers = 4;
inline constexpr std::size_t kMaxLeaves = 2;
inline constexpr std::uint32_t kMaxChunks = 32;
inline constexpr std::uint32_t kMaxRestarts = 4;

enum class Network : std::uint8_t { monotone, merged, exact };

struct Scope {
  std::uint16_t workers = 2;              // 1..kMaxWorkers
  std::vector<std::uint16_t> leaves;      // workers below each, in order; all of them, or empty for no leaves
  std::uint32_t window = 1;               // W; the switch has 2W slots
  std::vector<std::uint32_t> operations;  // chunks of each, in the order in which workers call them; kMaxChunks in all
  std::vector<std::uint32_t> last;        // the last worker's, if it calls something else
  bool foreign_packets = false;           // another job's packets are on the wire
  std::uint32_t restarts = 0;             // of group or switch, in total; up to kMaxRestarts
  Network network = Network::monotone;
  std::uint32_t numbers = 0;     // packets have numbers, so far apart; 0: they have none
  std::uint32_t timeouts = 0;    // of each worker's timer, where packets have numbers
  std::uint64_t max_states = 0;  // stop there and say so; 0 means 2^32 - 2
};

struct Report {
  std::uint64_t states = 0;       // network merged: as many as machines
  std::uint64_t transitions = 0;  // tried, those that change nothing included
  std::uint32_t depth = 0;        // events from the start to the state found last; network merged: at least
  std::uint64_t machines = 0;     // states, the network left out of account
  std::uint64_t switches = 0;     // different states of the switch, by its canonical bytes
  std::uint64_t workers = 0;      // different states of a worker
  std::uint64_t packets = 0;      // different packets
  bool exhausted = false;
  std::string broken;              // which promise, or empty
  std::vector<std::string> trace;  // steps that break it, as `replay` takes them
  double seconds = 0;
};

// Throws std::invalid_argument for a scope without sense or beyond a bound.
Report search(const Scope& scope);

// One step of a trace, done again.
struct Record {
  std::string step;
  std::string source;  // "worker 0", "switch"; empty where nothing travels
  std::string to;
  std::string what;    // what happens, in words
  std::string became;  // what the machine made of it
  std::string state;   // of the machine that it happened to, afterwards
  std::string broken;  // the promise that this step breaks, or empty
};

// Steps, as words (L a generation, such as 1.2: incarnation and epoch; W a worker; C a chunk):
//   call W            the worker calls its next operation
//   L/W>C             its contribution reaches its switch
//   L/W<C             an answer reaches the worker
//   hear W            the worker hears that another one has ended
//   L/^F>C  L/^F<C    the sum of leaf F reaches the root, an answer of the root reaches leaf F
//   L/W!P             a NACK reaches the worker: its packets from P on are missing; L/^F!P: the leaf
//   restart group     restart switch     restart leaf F     rejoin W     rejoin leaf F
//   timeout W            with numbers: the worker's timer
// A packet of another job has an x before its generation.
// Where the network holds several such answers, =N picks the N-th that was sent.
// Network exact: also `copy` or `lose` before a packet, and `timeout W N`, N timers of a worker, one after the other.
// Throws std::invalid_argument at a step that cannot happen, naming it.
std::vector<Record> replay(const Scope& scope, const std::vector<std::string>& steps);

}  // namespace netfold::model_check
