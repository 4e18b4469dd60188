// Queues, sequence numbers, deadlines, completion: what turns algorithms into work that somebody can wait
// for.
//
// A group has one queue and at most one *driver* at a time. The driver is the process's engine thread, or the
// caller's own thread when the queue is empty and the caller is going to wait anyway: a small operation then
// costs no hop between threads. A small one is tried once on the caller's thread even if the caller will not
// wait; the engine thread is woken for what is left over. Operations start strictly in order of submission. Those
// over the mesh run one at a time, those inside the network stream through one window together; the two kinds
// overlap each other.
//
// Messages between two ranks (send, receive) are outside that order: they go over pipes of their own, are
// taken up at once, and neither wait for collectives nor hold them up. One that nobody waits for is the engine
// thread's after `kTakeoverDelayNs`, or a little more; until then, and whenever nobody drives, who waits for it drives. So it
// is with a small call through memory that was tried: the others have what they need of it.
//
// A failure is the group's: streams between ranks are no longer at a known place, so the operation under way,
// those queued and all later ones fail with the first reason, and the peers are told. Other groups are
// untouched.
//
// How nothing is missed on the way to sleep. A driver clears `wake_`, then takes a turn, then lists what to wait for,
// `wake_` among it, looks once more, and sleeps. It clears `wake_` nowhere else: a request made after the turn stays in
// `wake_` and ends the sleep. While the engine thread sleeps, a thread of the caller may take the group over
// (`engine_sleeps_`, under `mutex_`); the engine thread, awake again, leaves alone what it does not drive.
//
// A caller's thread that waits may have to run handlers of signals, such as Python's: those that `Interrupts` says so
// of, asked every kSignalCheckNs and whenever a signal ends the sleep. The thread does not drive while it asks, because a
// handler may itself use or close the group. A sleep ends after kSignalCheckNs at the latest, so a signal just before the
// sleep, or one that another thread received, is heard too; a mask for ppoll would not do for the latter. Where a
// handler wants the wait to end, the group fails: the operation ends on this rank before the wait does, so nobody
// touches its tensors any more, and the other ranks hear the reason. An operation shorter than kSignalCheckNs asks nothing.
//
// Waiting for memory looks again and again for `spin_us` (with a word to the scheduler now and then, each time where
// there are more ranks than cores), then sleeps in ppoll until a socket, a bell, a timer or a submission wakes it. It
// never holds a core.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/point_to_point.hpp>
#include <netfold/collective/shares.hpp>
#include <netfold/collective/switch_path.hpp>
#include <netfold/engine/event.hpp>
#include <netfold/engine/status.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace netfold::engine {

class Engine;
class Group;

std::int64_t now_ns();

// How a waiting thread of the caller runs handlers of signals. Both functions are null where there are none to run.
struct Interrupts {
  // Whether handlers run on the calling thread. Cheap, and called without any lock.
  bool (*run_on_this_thread)() = nullptr;
  // Run the handlers of signals that came. True: one wants the wait to end. They may call this group.
  bool (*interrupts_wait)() = nullptr;
};

// What somebody above the engine should look into.
struct AsyncEvent {
  enum class Kind : std::uint8_t {
    broken = 0,   // a connection to `ranks[0]`: it can be made again
    overdue = 1,  // an operation waits for `ranks`, longer than usual
  };
  Kind kind = Kind::broken;
  std::uint64_t group = 0;
  std::vector<int> ranks;
  int lane = 0;
  int rail = 0;
  std::uint32_t sequence = 0;
  std::int64_t waited_ns = 0;
};

// A submitted call. Shared by who waits and who drives.
class Operation {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // True when done within the time; -1 waits for ever (the operation's own deadline still ends it).
  bool wait(std::int64_t timeout_ns) const;
  // Put the id into the engine's completion queue when done. False: it already is, nothing will be queued.
  bool notify();
  std::uint64_t id() const { return id_; }
  // After done().
  const collective::Failure& failure() const { return failure_; }
  const EventRecord& record() const { return record_; }
  // Of a send or receive: the other end; of a receive from any source, who it was.
  int peer() const { return call_.root; }

 private:
  friend class Group;
  friend class Engine;
  collective::Call call_;
  std::uint64_t id_ = 0;
  std::int64_t timeout_ns_ = 0;
  std::int64_t deadline_ns_ = 0;
  std::int64_t overdue_ns_ = 0;  // when others should hear that it waits
  const char* site_ = nullptr;   // where it was called, if known; lives for ever
  EventRecord record_;
  collective::Failure failure_;
  std::unique_ptr<collective::Algorithm> algorithm_;
  std::atomic<bool> done_{false};
  bool notify_ = false;
  bool updates_shares_ = false;   // how the next split one is to be cut
  bool in_grace_period_ = false;  // past its deadline, for news of who is at fault
  mutable std::mutex mutex_;
  mutable std::condition_variable condition_;
};

// One row of the choice table: from `min_bytes` on, `kind` runs by `algorithm` in `wire` (-1: the tensor's
// dtype), a hierarchical one by `between` between hosts. Rows of one kind are in ascending order and the first starts
// at 0.
struct Choice {
  collective::Kind kind = collective::Kind::barrier;
  std::uint64_t min_bytes = 0;
  collective::AlgorithmId algorithm = collective::AlgorithmId::direct;
  int wire = -1;
  collective::AlgorithmId between = collective::AlgorithmId::local;
};

class Group {
 public:
  struct Options {
    std::uint64_t id = 0;
    std::string job;  // names the group to who looks from outside
    int spin_us = 0;
    bool spins_for_sockets = false;  // as well; else only while an operation goes through memory
    bool yields = false;             // between two looks
    std::vector<Choice> table;
    std::uint16_t table_hash = 0;
    std::vector<int> nodes;  // the host of each rank, by a number
  };
  // Use Engine::add_group. `lane`: further connections to the same ranks, for messages between two of them; `spares`:
  // for what each switch was to do and cannot.
  Group(Engine& engine, Options options, std::unique_ptr<transport::Mesh> mesh, std::unique_ptr<transport::Mesh> lane,
        std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes);
  ~Group();

  // Before the first operation, once for each spare mesh. Operations may then run inside the network, over all that are
  // attached at once; `rows`, of a table with the hash `table`, say what takes this one's place while its switch is
  // gone.
  void attach(std::unique_ptr<collective::Channel> channel, std::vector<collective::SwitchPath::Row> rows,
              std::uint16_t table);
  // Before the first operation that goes by them: another table, and what an all_reduce by `split` goes by, rates and
  // parts as of Shares. Every rank says the same between the same two operations. What led to a table is in no record.
  void set_table(std::vector<Choice> table, std::uint16_t hash);
  void set_shares(collective::Shares shares);
  // As of the last operation; nullopt where there are none.
  std::optional<collective::Shares> shares() const;
  // From any thread, what recovery asks of a switch path (collective/switch_path.hpp), by the order of attaching.
  void on_switch_path(std::size_t shard, const std::function<void(collective::SwitchPath&)>& action);

  // Before the first operation. The ranks of this rank's host share this memory.
  void share(std::unique_ptr<transport::ShmNode> node);

  // The call's kind, dtype, reduce, average, root, tag and buffers; the rest is filled in here. With
  // `on_this_thread` the caller promises to wait, and may be made to drive. Throws std::invalid_argument for
  // a call that can never be right; a group that has failed returns an operation that has, too.
  // `site`: where it was called, if that is known; lives for ever.
  std::shared_ptr<Operation> submit(collective::Call call, std::int64_t timeout_ns, bool on_this_thread,
                                    const char* site = nullptr);

  // True when `operation`, of this group, is done within the time (-1: its own deadline). May be made to drive. Where
  // `Interrupts` end the wait, the group fails, and the operation is done on return.
  bool wait(const Operation& operation, std::int64_t timeout_ns);

  // What would run this: the table's word.
  Choice choose(collective::Kind kind, kernels::DType dtype, kernels::ReduceOp reduce, std::uint64_t bytes) const;

  // From any thread: everything under way and to come fails with `failure`. Idempotent.
  void fail(collective::Failure failure);
  // The reason this group failed, if it did.
  collective::Failure failure() const;

  // The connections under the mesh (lane 0), the lane of messages (1) and the spare meshes (from 2 on); from any
  // thread, see transport/tcp/resumable_socket.hpp.
  struct Broken {
    std::uint64_t received = 0;
    int reconnects = 0;
  };
  // Of a connection that is broken; nullopt of any other.
  std::optional<Broken> broken(int lane, int peer, int rail);
  // As above, after giving it up if it is up and was mended no more than `reconnects` times (-1: however often).
  std::optional<Broken> disconnect(int lane, int peer, int rail, int reconnects);
  // False, too, where it was mended since it had been mended `reconnects` times: the peer was told of another state.
  bool reconnect(int lane, int peer, int rail, int reconnects, transport::Fd socket, std::uint64_t peer_received,
                 const auth::StreamSecrets& secrets);
  // If it is still broken, and was mended `reconnects` times.
  void give_up(int lane, int peer, int rail, int reconnects, const std::string& why);

  // The number of collectives that this rank has submitted. Equal on all ranks between collectives.
  std::uint32_t collectives_submitted() const;
  // How call `sequence` of this rank was made (MessageHeader::summary), if it was one of the last kRecentCalls.
  std::optional<std::string> recent_call(std::uint32_t sequence) const;
  // What this rank does, for others who wait for it: a sentence without its subject.
  std::string last_seen() const;

  struct Traffic {
    std::uint64_t generation = 0;  // of the membership; 0: the switch is gone
    std::uint64_t packets_sent = 0;
    std::uint64_t retransmissions = 0;
    std::int64_t smoothed_rtt_ns = 0;
    std::uint64_t oldest_outstanding = 0;
    bool idle = true;
    std::string path_error;  // why nothing reaches the switch, where that is known
    std::string send_error;  // what this host last refused to send there
    std::uint64_t drops[protocol::kDropCount] = {};
  };
  // Of each channel to a switch, by the order of attaching, as of the last turn.
  std::vector<Traffic> traffic() const;

  // Those of the newest records that came after the first `since`, oldest first, and how many there ever were.
  std::vector<EventRecord> events(std::uint64_t since, std::uint64_t* total) const;

  int rank() const { return mesh_->rank(); }
  int size() const { return mesh_->size(); }

 private:
  friend class Engine;
  enum class Driver : std::uint8_t { none, engine, caller };
  static constexpr std::size_t kEventCapacity = 8192;
  // Up to so much in all tensors together, a call of a caller who will not wait is tried once on its thread.
  static constexpr std::uint64_t kTryBytes = 16 << 10;
  // Beyond its deadline, how long an operation that waits for a rank that may wait for another listens for the
  // name of that other.
  static constexpr std::int64_t kGracePeriodNs = 250'000'000;

  // How long a group that lost a rank keeps its other connections (see fail_all).
  static constexpr std::int64_t kPeerLostGraceNs = 300'000'000;
  // How long a group that failed waits for ranks that touch this rank's tensors: for one piece of them, unless they are
  // stopped.
  static constexpr std::int64_t kRevokeNs = 5'000'000'000;
  // How long a group that ends waits for messages to reach the other ranks' hosts, looking every so often.
  static constexpr std::int64_t kLingerNs = 1'000'000'000;
  static constexpr std::int64_t kLingerStepNs = 5'000'000;

  // How long a driver looks at pipes that move nothing by themselves before it sleeps: what lying down and getting up
  // costs with them.
  static constexpr std::int64_t kDrivenSpinNs = 5'000;

  // Between two questions about signals, see Interrupts. One costs a lock of the interpreter's.
  static constexpr std::int64_t kSignalCheckNs = 200'000'000;

  // From how long a wait on others are told, and again after three times as long.
  static constexpr std::int64_t kOverdueNs = 1'000'000'000;
  static constexpr std::size_t kRecentCalls = 16;

  // Runs it as a driver does, and returns when it was run.
  void run_driver_task(std::function<void()> action);
  transport::Mesh& mesh_of(int lane);
  // Whether a connection would lose bytes of ours if it closed now.
  bool has_unsent() const;
  void flush();
  void check_overdue(Operation& operation, std::int64_t now);
  // Until the operation is done, or at the first turn past `until_ns` (-1: none). True: a signal ended a sleep before
  // that. `comes_back`: the caller drives again at once, if nobody else does, so that the engine thread has time.
  bool drive_until(const Operation& operation, std::int64_t until_ns, bool comes_back);
  // As drive_until, with pauses to ask about signals, also while another thread drives. `drives`: this one does.
  bool wait_until(const Operation& operation, std::int64_t until_ns, bool drives);
  bool can_take_over() const;        // under mutex_
  void take_over(std::int64_t now);  // likewise: the caller's thread drives from now on
  bool progress(std::int64_t now);   // what it throws is the group's failure
  bool progress_once(std::int64_t now);
  static bool is_split(const Operation& operation);
  static bool is_on_mesh(const Operation& operation);
  bool mesh_is_taken() const;
  // Whether the parts of a split operation are found by what this one does.
  bool updates_shares(const Operation& operation) const;
  bool can_start(const Operation& operation) const;
  void start_next(std::int64_t now);
  void complete(Operation& operation, collective::Failure failure);
  bool progress_transfers(std::int64_t now, collective::Failure& failure);
  void begin_transfers(std::int64_t now);
  void check_transfer_deadlines(std::int64_t now, collective::Failure& failure);
  collective::Failure timed_out(const Operation& operation) const;
  // Another rank gave up because a collective passed its deadline. Where this rank is in that collective, with the same
  // timeout, the failure is the timeout here too: one cause has one name on all ranks.
  void share_timeout(collective::Failure& failure);
  void fail_all();
  // True when no rank of this host touches this rank's memory any more, or one has been stopped in the midst of that
  // for kRevokeNs, which `failure` then says. False: to be asked again at look_at_users_ns_.
  bool reclaim_memory(std::int64_t now, collective::Failure& failure);
  int user_of_memory() const;  // -1: no rank of this host
  // A connection that broke does not say why; in shared memory its owner may have.
  void read_failure_in_memory(collective::Failure& failure) const;
  void publish_traffic();
  void publish_status();
  void enter(std::int64_t now);  // under mutex_; a thread of the caller, to wait or drive
  void leave(std::int64_t now);  // likewise
  void wait_for(collective::WaitSet& set);
  void cancel_sleep();
  std::int64_t spin_ns() const;
  bool has_work() const;        // under mutex_
  bool may_leave_work() const;  // likewise, and without a driver: to who may be about to wait for it
  void wake_driver();
  bool driven_by_engine() const;
  std::string describe(const Operation& operation) const;
  static std::string within(std::int64_t timeout_ns);

  Engine& engine_;
  Options options_;
  std::unique_ptr<transport::Mesh> mesh_;
  std::unique_ptr<collective::PointToPoint> lane_;
  std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes_;
  const bool needs_progress_;  // its meshes, for what was sent
  std::vector<std::unique_ptr<collective::SwitchPath>> switch_paths_;
  std::unique_ptr<transport::ShmNode> node_;
  std::unique_ptr<collective::Shares> shares_;

  mutable std::mutex mutex_;  // guards what follows, up to the blank line
  std::deque<std::shared_ptr<Operation>> inbox_;
  Driver driver_ = Driver::none;
  bool engine_sleeps_ = false;  // it drives this group and sleeps: a caller may take over
  std::condition_variable driver_left_;
  int waiting_ = 0;      // threads that wait while another drives
  int inside_ = 0;       // threads of the caller that wait or drive
  int outstanding_ = 0;  // operations that are not done
  collective::Failure failure_;
  std::uint32_t next_sequence_ = 1;
  std::uint32_t next_transfer_ = 1;  // counted apart: ranks differ in how many they make
  std::vector<EventRecord> events_;
  std::uint64_t event_count_ = 0;
  std::vector<Traffic> traffic_;
  std::optional<collective::Shares> told_shares_;
  bool closed_ = false;
  std::vector<std::function<void()>> driver_tasks_;
  bool behind_ = false;  // a mended connection has things to say again, or a pipe needs driving
  std::array<collective::MessageHeader, kRecentCalls> recent_calls_;

  // The driver's alone.
  std::deque<std::shared_ptr<Operation>> queue_;
  std::vector<std::shared_ptr<Operation>> active_;
  StatusEntry* status_;
  std::deque<std::shared_ptr<Operation>> arrived_;                 // transfers, not yet given to the lane
  std::map<std::uint64_t, std::shared_ptr<Operation>> transfers_;  // the oldest first
  std::int64_t transfer_deadline_ns_ = -1;                         // not after the first of them
  std::int64_t revoke_until_ns_ = -1;   // of a failed group: how long it waits for ranks that touch its memory
  std::int64_t look_at_users_ns_ = -1;  // likewise, while it waits: when it looks again
  std::int64_t linger_until_ns_ = -1;
  std::int64_t close_ns_ = -1;  // of a failed group: when its connections end
  bool failure_names_operation_ = false;
  transport::Fd wake_;
};

// The one engine of a process. Its thread starts with the first group and ends with the last.
class Engine {
 public:
  static Engine& instance();
  std::shared_ptr<Group> add_group(Group::Options options, std::unique_ptr<transport::Mesh> mesh,
                                   std::unique_ptr<transport::Mesh> lane,
                                   std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes);
  // Fails what is under way, waits until no driver is left, forgets the group.
  void remove_group(const std::shared_ptr<Group>& group);

  // Takes the id of one completed operation that asked for notice; nullopt when none came in time, or after
  // `interrupt_completions`.
  std::optional<std::uint64_t> next_completion(std::int64_t timeout_ns);
  void interrupt_completions();

  // As above, of news.
  void post_event(AsyncEvent event);
  std::optional<AsyncEvent> next_async_event(std::int64_t timeout_ns);
  void interrupt_async_events();

  // Of the process, for all that wait from now on. To be called once, before the first wait.
  static void set_interrupts(Interrupts interrupts);

 private:
  friend class Group;
  friend class Operation;
  // How long the engine thread leaves a message, or a small operation, to a caller who may be about to wait for it: a
  // hop costs more. Twice as much after each time that there was nothing left to do.
  static constexpr std::int64_t kTakeoverDelayNs = 100'000;
  static constexpr std::int64_t kMaxTakeoverDelayNs = 800'000;
  explicit Engine(const Engine* of_parent) : of_parent_(of_parent) {}
  // The engine thread's own; kept between rounds, so that one needs no memory.
  struct Round {
    std::vector<std::shared_ptr<Group>> driven;
    collective::WaitSet set;
    std::int64_t idle_since = 0;
  };
  void run();
  bool run_once(Round& round);  // false: the thread is to end
  static bool progress_all(const std::vector<std::shared_ptr<Group>>& driven);
  static void set_sleeping(const std::vector<std::shared_ptr<Group>>& driven, bool sleeps);
  void wake();
  void wake_after_delay();
  void push_completion(std::uint64_t id);

  // Of the process that this one was forked from, kept within reach of who looks for lost memory.
  [[maybe_unused]] const Engine* const of_parent_;
  std::mutex thread_mutex_;  // of the thread; taken before mutex_, never by the thread itself
  std::mutex mutex_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::thread thread_;
  bool stopping_ = false;
  transport::Fd wake_;
  transport::Fd timer_;
  std::atomic<bool> timer_armed_{false};
  std::atomic<std::int64_t> takeover_delay_ns_{kTakeoverDelayNs};
  std::atomic<std::uint64_t> next_operation_id_{1};

  std::mutex completion_mutex_;
  std::condition_variable completion_condition_;
  std::deque<std::uint64_t> completions_;
  std::uint64_t completion_interrupts_ = 0;

  static constexpr std::size_t kMaxAsyncEvents = 4096;  // more is forgotten, while nobody listens
  std::mutex async_event_mutex_;
  std::condition_variable async_event_condition_;
  std::deque<AsyncEvent> async_events_;
  std::uint64_t async_event_interrupts_ = 0;
};

}  // namespace netfold::engine
