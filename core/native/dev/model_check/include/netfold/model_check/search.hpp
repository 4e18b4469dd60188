// Exhaustive search of small scopes: every order of events that the production machines can meet.
//
// Theory of operation. A state is the switch's machine, every worker's machine with the chunks that it delivered, and
// the network as a set of packets. The search tries every event from each state, breadth first, so the first broken
// promise that it finds has the shortest trace.
//
//   network    A packet may be delivered at any time after it was sent, in any order. There are three views of it:
//     monotone Packets stay for ever. This covers every loss (no delivery), delay (late delivery), reordering and
//              duplicate (second delivery), all without bound: a run with any of them meets the same machines with
//              fewer packets in the network, so it is among the runs searched. Corruption is a loss.
//     merged   As monotone, with one state for all states of the same machines; its network is the union of theirs.
//              More packets can only do more, so nothing is missed. A trace may mix packets of several runs, so search
//              for a finding once more with a monotone network. The largest scopes use this view.
//     exact    A delivery removes the packet or leaves a copy, or the packet is lost, as in a real network. There are
//              as many states as subsets of packets: for scopes so small that the three views can be compared.
//   time       A worker's clock may have any value. Workers that differ in clocks, packet numbers and estimates only
//              count as equal: these decide which chunk is sent again, and when, and the packet of a chunk that is sent
//              again is in the network already. The search checks this at every state of a worker: each packet reaches
//              the worker as it is, and after each number of timeouts, with its lost chunks sent again and not yet
//              sent. All must have the same effect, and timeouts must send only what was sent before.
//   sending    A worker sends as soon as it may: a worker that sends later is one whose packets arrive later.
//   foreign    The network may hold another job's contributions and results, for every chunk and worker, from the
//              start.
//   last       The last worker may call other operations. A worker that gets a mismatch ends: it accepts and sends
//              nothing more. From then on every other worker of that generation may learn of it over the control
//              connection, and ends as well.
//   leaves     Workers may be below leaf switches, and these below the switch, which is then the root. A leaf sends its
//              sum when it is complete, and once more for each repeated contribution. Further packets of its
//              ParentSender are in the network already.
//   restart    The only fault with a bound. Of the group: the next epoch. Of the switch: a new incarnation, whose
//              epochs start from the first. The new switch machine exists at once, and each worker rejoins at any later
//              time; until then the old worker goes on (admission promises more: all old workers end before any new one
//              starts). A leaf may also restart, and loses its state at once: it has a new incarnation, and the root
//              and the other leaves have the next epoch. The other leaves rejoin at any later time, and a worker once
//              its leaf has.
//   pipelines  Switches may be by the hardware profile. Without numbers netfold.p4 is the machine that any switch is
//              here; with numbers its switches detect no gaps, send no NACKs and ignore those of a root. A switch in
//              software tells the workers of a mismatch at most every few milliseconds, a pipeline of each packet: that
//              is what every switch does here, and a loss covers the other. With `chunk_bits` a pipeline is
//              netfold_tna.p4's (tofino_job.hpp).
//   outlives   A pipeline goes on when its control plane ends. After a restart of the switch the old pipeline still
//              answers the generation before, beside the new switch.
//   rogue      The last worker may break the rule of the window: from the start the network holds two contributions of
//              its own to each chunk number, those beyond the operation and those that `chunk_bits` cut included.
//   numbers    Packets may have their numbers, and the switch and the leaves gap detection and senders of their own; a
//              NACK is then a packet like others. A socket refuses each packet so often that numbers lie far apart:
//              with a distance of eight, one later packet has the effect of eight. A retransmission is a new packet, so
//              there are bounds: on the timeouts of each worker, and on the requests to each leaf to send sums again.
//              Clocks stand still but at a timeout. A worker's state is then its whole machine. A leaf's results from
//              the root have successive numbers: another search covers what its sender does about skipped ones
//              (lab/src/netfold_lab/model_check/parent_sender.py). Not together with `last`.
//
// Safety. A worker is given the exact sum of every worker's contribution to a chunk in that generation, once, and never
// the sum of a chunk on which workers disagree. No mismatch is reported for a chunk on which all agree, and none names
// a worker with the reader's own call. The contribution of worker w is a number in [1024, 2048), different for each
// chunk and generation, times 2^16w. So no other subset, no double count, and no mixture of chunks or generations has
// the same sum, and two contributions of one worker already exceed its range. The result of a chunk that a switch once
// announced never changes. Of a rogue worker any one of its contributions may be in a sum.
//
// With numbers: no sender uses a packet number twice. A NACK names no packet that has come, or that fewer than eight
// later ones passed over. A chunk that a NACK names, and that has no result, is sent again at once. Without a timeout
// no other chunk is sent again but those that the result of a later one passed over, where a result had been skipped.
//
// Possibility. From every state reached there is a path, without a further fault, to a state in which every worker has
// finished all operations, or, where workers disagree, has finished or ended. A rogue worker may stop its peers, so
// there this is not asked. Unless the network is exact, the path starts from the machines with an empty network, since
// another packet can only help (it need not be delivered): the hardest case, in which all packets were lost. With
// numbers, the path consists of as many timeouts as it takes.
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
  std::vector<std::uint16_t> leaves;      // workers below each, in order and `workers` in all; empty: no leaves
  std::uint32_t window = 1;               // W; the switch has 2W slots
  std::vector<std::uint32_t> operations;  // chunks of each, in the order in which workers call them; kMaxChunks in all
  std::vector<std::uint32_t> last;        // the last worker's operations; empty: as the others'
  bool foreign_packets = false;           // the network holds another job's packets
  std::uint32_t restarts = 0;             // of group or switch, in total; up to kMaxRestarts
  Network network = Network::monotone;
  std::uint32_t numbers = 0;     // distance of packet numbers; 0: packets have no numbers
  std::uint32_t timeouts = 0;    // with numbers: of each worker
  std::uint32_t pipelines = 0;   // switches by the hardware profile: bit 0 the switch, or root, and bit 1 + F leaf F
  std::uint32_t chunk_bits = 0;  // pipelines compare so many bits of a chunk, as netfold_tna.p4; 0: all, as netfold.p4
  bool outlives = false;         // a pipeline goes on after a restart of the switch, beside the new one
  bool rogue = false;            // the last worker breaks the rule of the window
  std::uint64_t max_states = 0;  // stops there, not exhausted; 0 means 2^32 - 2
};

struct Report {
  std::uint64_t states = 0;       // network merged: equal to `machines`
  std::uint64_t transitions = 0;  // tried, those without effect included
  std::uint32_t depth = 0;        // events from the start to the state found last; network merged: at least so many
  std::uint64_t machines = 0;     // states that differ in more than the network
  std::uint64_t switches = 0;     // different states of the switch, by its canonical bytes
  std::uint64_t workers = 0;      // different states of a worker
  std::uint64_t packets = 0;      // different packets
  bool exhausted = false;
  std::string broken;              // the broken promise, or empty
  std::vector<std::string> trace;  // steps that break it, as `replay` takes them
  double seconds = 0;
};

// Throws std::invalid_argument for a scope that is contradictory or beyond a bound.
Report search(const Scope& scope);

// One replayed step of a trace.
struct Record {
  std::string step;
  std::string source;  // "worker 0", "switch"; empty for a step without a packet
  std::string to;
  std::string what;    // the event, in words
  std::string became;  // its effect on the machine
  std::string state;   // of that machine afterwards
  std::string broken;  // the promise that this step breaks, or empty
};

// Replays steps from the first state. Steps (L a generation, such as 1.2: incarnation and epoch; W a worker; C a
// chunk):
//   call W            the worker calls its next operation
//   L/W>C             its contribution reaches its switch
//   L/W<C             an answer reaches the worker
//   hear W            the worker learns that another worker has ended
//   L/^F>C  L/^F<C    the sum of leaf F reaches the root, an answer of the root reaches leaf F
//   L/W!P             a NACK reaches the worker: its packets from number P on are missing; L/^F!P: the leaf
//   restart group     restart switch     restart leaf F     rejoin W     rejoin leaf F
//   timeout W         with numbers: the worker's timer expires
// A packet of another job has an x before its generation.
// Where the network holds several such answers, =N picks the N-th that was sent.
// Network exact: also `copy` or `lose` before a packet, and `timeout W N`: N timeouts of a worker, one after the other.
// Throws std::invalid_argument that names the first step that cannot happen.
std::vector<Record> replay(const Scope& scope, const std::vector<std::string>& steps);

// Exhaustive search of address validation: which hellos make an address a worker's (protocol/address_validation.hpp).
//
// A state is every worker's AddressValidation. From each state every possible hello may come, any number of times:
// - a worker's own, with its nonce and from the address that it named;
// - the same hello, which an eavesdropper sends from another address;
// - one that names another worker, with the sender's own nonce;
// - one of a former incarnation of the switch, or of another job, and otherwise right;
// - one of an outsider, who knows no nonce, from its own address or from a forged one.
//
// Safety. The switch accepts and returns no hello but the worker's own. Possibility. From every state each worker's own
// hello gives it its address.
//
// Throws std::invalid_argument for 0 workers, or more than kMaxWorkers. The trace consists of hellos, in words.
Report search_validation(std::uint16_t workers);

}  // namespace netfold::model_check
