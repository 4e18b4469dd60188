// A group: queues, sequence numbers, deadlines and completion. It turns algorithms into operations to wait for.
//
// Driver. A group has one queue and at most one driver at a time. The driver is the engine thread, or a caller's thread
// when the queue is empty and the caller will wait: a small operation then needs no hop between threads. A caller that
// will not wait tries a small operation once; the engine thread is woken for the rest. Operations start in the order of
// submission. Those on the mesh run one at a time. Those in the network stream through one window together. The two
// kinds overlap.
//
// Transfers (send, receive) are outside that order. They use pipes of their own, start at once, and neither wait for
// collectives nor delay them. A waiting caller drives them while no other thread does. The engine thread takes over
// after Engine::kTakeoverDelayNs, up to Engine::kMaxTakeoverDelayNs. The same delay holds for a small operation through
// shared memory that was tried once: the other ranks already have what they need of this rank.
//
// Failure. A failure ends the whole group: the positions in its streams are no longer known. The operation under way,
// the queued and all later operations fail with the first reason, and the peers are told. Other groups are untouched.
//
// Sleep without a lost wake-up. A driver clears `wake_`, polls, lists what to wait for (`wake_` included), polls once
// more, and sleeps. It clears `wake_` nowhere else, so a request after the first poll stays in `wake_` and ends the
// sleep. While the engine thread sleeps, a caller may take over the group (`engine_sleeps`, under the inbox's lock).
// The engine thread then skips the group after its sleep. core/tests/communicator/test_sleep_protocol.py searches this
// protocol.
//
// Signals. A waiting caller's thread may have to run signal handlers, such as Python's. It asks `Interrupts` every
// kSignalCheckNs, and when a signal ends its sleep. It does not drive during the handler, which may use or close the
// group. A sleep ends after kSignalCheckNs at the latest. So a signal just before the sleep, or one that another thread
// received, is handled too; a signal mask for ppoll would not cover the latter. If a handler ends the wait, the group
// fails: the operation ends on this rank before the wait does, so no thread touches its tensors afterwards, and the
// other ranks learn the reason. An operation shorter than kSignalCheckNs asks nothing.
//
// Spinning. A driver that waits for shared memory polls for `spin_us`, and yields the core every 16th time (each time
// where the host has more ranks than cores). Then it sleeps in ppoll until a socket, a doorbell, a timer or a
// submission. It never holds a core.
#pragma once

#include <netfold/collective/registry.hpp>
#include <netfold/collective/switch_path.hpp>
#include <netfold/engine/inbox.hpp>
#include <netfold/engine/status_publisher.hpp>
#include <netfold/engine/transfers.hpp>
#include <netfold/transport/mesh.hpp>
#include <netfold/transport/shm/shm_node.hpp>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace netfold::engine {

class Engine;

// How a waiting caller's thread runs signal handlers. Both are null in a process without handlers.
struct Interrupts {
  // Whether the calling thread runs handlers. Cheap; called without any lock.
  bool (*run_on_this_thread)() = nullptr;
  // Run the handlers of pending signals; they may call this group. True: a handler ends the wait.
  bool (*interrupts_wait)() = nullptr;
};

class Group {
 public:
  struct Options {
    std::uint64_t id = 0;
    std::string job;  // the group's name in the status segment
    int spin_us = 0;
    bool spins_for_sockets = false;  // else only while an operation uses shared memory
    bool yields = false;             // at each pause
    std::vector<collective::Choice> table;
    std::uint16_t table_hash = 0;
    std::vector<int> nodes;  // the host of each rank, by a number
  };
  // Use Engine::add_group. `lane`: further connections to the same ranks, for transfers. `fallback_meshes`: a mesh for
  // each switch, which replaces the switch while it is lost.
  Group(Engine& engine, Options options, std::unique_ptr<transport::Mesh> mesh, std::unique_ptr<transport::Mesh> lane,
        std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes);

  // For all groups: call once, before the first wait.
  static void set_interrupts(Interrupts interrupts);
  // For all groups: how long a failed group waits for ranks that touch this rank's tensors. They end one chunk, unless
  // their process is stopped. kRevokeNs unless set; call before the first group fails.
  static constexpr std::int64_t kRevokeNs = 5'000'000'000;
  static void set_revoke_wait(std::int64_t ns);

  // Attach a switch; before the first operation, once for each fallback mesh. An operation in the network uses all
  // attached switches at once. `choices`: the choice table while this switch is lost; `table`: its hash. `hardware`: the
  // switch has the hardware profile; what the profile cannot reduce is for the algorithms of `choices`.
  void attach(std::unique_ptr<collective::Channel> channel, std::vector<collective::Choice> choices,
              std::uint16_t table, bool hardware);
  // Replace the table, or the rates and parts of `split`. Every rank does so between the same two operations, before
  // the first that uses them. Clears the event records: they do not hold the operations that led to a table.
  void set_table(std::vector<collective::Choice> table, std::uint16_t hash);
  void set_shares(collective::Shares shares);
  // As of the last operation; nullopt: none were set.
  std::optional<collective::Shares> shares() const { return inbox_.lock()->shares; }
  // Run `action` on a switch path, by the order of attaching, as the driver does. From any thread.
  void on_switch_path(std::size_t shard, const std::function<void(collective::SwitchPath&)>& action);
  // Share memory with the ranks of this host; before the first operation.
  void share(std::unique_ptr<transport::ShmNode> node);

  // Submit a call with kind, dtype, reduce, average, root, tag and buffers; the group fills in the rest.
  //
  // timeout_ns: -1 for none.
  // on_this_thread: the caller will wait, and may have to drive.
  // site: where the call was made, or nullptr; the text must never be freed.
  // owner: of the buffers; released when the operation is done, also where this call throws. nullptr: the caller keeps
  // them.
  // Returns a failed operation if the group has failed. Throws std::invalid_argument for a call that is never valid.
  std::shared_ptr<Operation> submit(collective::Call call, std::int64_t timeout_ns, bool on_this_thread,
                                    const char* site = nullptr, BufferOwnerPtr owner = nullptr);
  // Take back an internal receive whose message has not begun to arrive, so that its buffer may go. False: it has, or
  // the receive is done. From any thread.
  bool withdraw(const Operation& receive);
  // Wait for an operation of this group up to `timeout_ns` (-1: its deadline); may have to drive. True: done. If
  // `Interrupts` end the wait, the group fails, and the operation is done on return.
  bool wait(const Operation& operation, std::int64_t timeout_ns);

  // The choice table's row for such a call, or that of the table without a switch for what the switch cannot reduce.
  collective::Choice choose(collective::Kind kind, kernels::DType dtype, kernels::ReduceOp reduce,
                            std::uint64_t bytes) const;

  // Fail everything under way and to come, unless the group failed before. From any thread.
  void fail(collective::Failure failure);
  collective::Failure failure() const { return inbox_.lock()->failure; }

  // Connections, from any thread (transport/tcp/resumable_socket.hpp). `lane`: 0 the mesh, 1 the transfers' lane, from
  // 2 on the fallback meshes. `reconnects`: how often the caller knows the connection to have been reconnected.
  struct Broken {
    std::uint64_t received = 0;  // bytes
    int reconnects = 0;          // -1: it was never connected
  };
  // The state of a broken connection; nullopt: it is not broken.
  std::optional<Broken> broken(int lane, int peer, int rail);
  // The same, after disconnecting a connection that is up and was reconnected at most `reconnects` times (-2: any).
  // Blocks up to ResumableSocket::kLastNs.
  std::optional<Broken> disconnect(int lane, int peer, int rail, int reconnects);
  // Whether both ends are about to disconnect a connection, or did, since it is idle. Until it is used again, its end is
  // no break. To be called before either end disconnects.
  void set_released(int lane, int peer, int rail, bool is_released);
  // The connections that may be disconnected without harm while they are idle, the longest idle first.
  struct Idle {
    std::int64_t since_ns = 0;
    int lane = 0;
    int peer = 0;
    int rail = 0;
  };
  std::vector<Idle> idle_connections();
  // The connections to hosts that confirm nothing any more (ResumableSocket::is_silent), as lane, peer and rail.
  std::vector<std::array<int, 3>> silent_connections();
  // Handle what comes over the connections from now on, also while no operation is under way: a peer may begin a stream
  // over a fabric.
  void serve_connections() {
    post_driver_task([this] { flush(); });
  }
  // Continue over `socket`. False: that is impossible, or the connection was reconnected meanwhile, and the peer knows
  // another state.
  bool reconnect(int lane, int peer, int rail, int reconnects, transport::Fd socket, std::uint64_t peer_received,
                 const auth::StreamSecrets& secrets);
  // Give a connection that was never made its socket, without waiting for the driver. Closes `socket` where the
  // connection has been made meanwhile.
  void connect(int lane, int peer, int rail, transport::Fd socket, const auth::StreamSecrets& secrets);
  // Declare a connection lost, if it is still broken and was not reconnected meanwhile. is_orderly: the peer closed the
  // group.
  void give_up(int lane, int peer, int rail, int reconnects, const std::string& why, bool is_orderly);

  // The number of collectives that this rank has submitted. Equal on all ranks between collectives.
  std::uint32_t collectives_submitted() const { return inbox_.lock()->next_sequence - 1; }
  // How call `sequence` of this rank was made (MessageHeader::summary), if it is one of the last Inbox::kRecentCalls.
  std::optional<std::string> recent_call(std::uint32_t sequence) const;
  // The present activity of this rank, for ranks that wait for it: a sentence without its subject.
  std::string last_seen() const { return status_.describe(); }
  // Of each channel to a switch, by the order of attaching, as of the driver's last poll.
  std::vector<Traffic> traffic() const { return inbox_.lock()->traffic; }
  // The newest records after the first `since` ever made, oldest first. `total`: the number of records ever made.
  std::vector<EventRecord> events(std::uint64_t since, std::uint64_t* total) const;

  std::uint64_t id() const { return options_.id; }
  int rank() const { return mesh_->rank(); }
  int size() const { return mesh_->size(); }

  // Wait until other ranks have all that they need of this rank's calls, at most kLeaveNs. Returns at once where a
  // thread waits for an operation, which an end of the group is meant to interrupt, and where the group has failed.
  void drain();

  // For the engine and its thread. `progress`, `spin_ns` and `add_to_engine_sleep` are the driver's.

  // Close the group: fail what is under way, wait until no thread drives, and free the ports to the switches.
  void end();
  // Take the driver's role, if there is work and no caller drives.
  bool try_drive_by_engine();
  bool driven_by_engine() const { return inbox_.lock()->driver == Driver::engine; }
  void release_if_idle();
  void set_engine_sleeps(bool sleeps);
  void add_to_engine_sleep(collective::WaitSet& set);
  // Poll once. True: something moved. Any exception becomes the group's failure.
  bool progress(std::int64_t now);
  // How long a driver polls without progress before it sleeps.
  std::int64_t spin_ns() const;
  bool yields() const { return options_.yields; }

 private:
  // A call with at most this many bytes in all tensors is tried once on the thread of a caller that will not wait.
  static constexpr std::uint64_t kTryBytes = 16 << 10;
  // How long an operation past its deadline waits for the name of the rank at fault, if an awaited rank may wait too.
  static constexpr std::int64_t kGracePeriodNs = 250'000'000;
  // How long a group that lost a rank keeps its other connections (fail_all).
  static constexpr std::int64_t kPeerLostGraceNs = 300'000'000;
  // How long a rank that leaves waits for its operations under way (drain): a rank that calls later gets an error.
  static constexpr std::int64_t kLeaveNs = 2'000'000'000;
  // How long an ending group waits until its transfers reach the other hosts, and the time between two looks.
  static constexpr std::int64_t kLingerNs = 1'000'000'000;
  static constexpr std::int64_t kLingerStepNs = 5'000'000;
  // How long a driver polls pipes that need progress before it sleeps: the cost of a sleep with such pipes.
  static constexpr std::int64_t kDrivenSpinNs = 5'000;
  // Time between two questions to Interrupts. One question takes the interpreter's lock.
  static constexpr std::int64_t kSignalCheckNs = 200'000'000;
  // Once the oldest active operation has been the oldest for so long, it posts AsyncEvent::Kind::overdue, and again
  // after three times as long. The time in the queue does not count: a long queue is no sign of a lost rank.
  static constexpr std::int64_t kOverdueNs = 1'000'000'000;

  // group.cpp: callers submit, wait and drive.
  // Drive until the operation is done, or the first poll past `until_ns` (-1: none). True: a signal ended a sleep.
  // `comes_back`: the caller will drive again at once unless another thread does, so do not hurry the engine thread.
  bool drive_until(const Operation& operation, std::int64_t until_ns, bool comes_back);
  // Drive, or wait for the driver, with pauses for signal handlers. `drives`: this thread has the driver's role.
  bool wait_until(const Operation& operation, std::int64_t until_ns, bool drives);
  void take_over(Inbox::State& inbox, std::int64_t now);
  bool has_work(const Inbox::State& inbox) const;
  // Whether the engine thread may leave the work to a caller that may be about to wait.
  bool may_delay_work(const Inbox::State& inbox) const;
  void cancel_sleep();

  // driver.cpp: the driver starts, polls and completes operations.
  bool progress_once(std::int64_t now);
  bool poll_active(std::int64_t now, collective::Failure& failure);
  void start_next(std::int64_t now);
  void complete(Operation& operation, collective::Failure failure);
  static bool is_split(const Operation& operation);
  static bool is_on_mesh(const Operation& operation);
  bool mesh_is_taken() const;
  // Whether the next split operation is cut by the rates of this one.
  bool updates_shares(const Operation& operation) const;
  bool can_start(const Operation& operation) const;
  // Fail if an operation's deadline has passed before it started. Reads the queue only when the earliest may have.
  void check_queue_deadline(std::int64_t now, collective::Failure& failure);
  // Another operation is now the oldest of the active ones.
  void begin_oldest(std::int64_t now);
  void check_overdue(const Operation& oldest, std::int64_t now);
  void ask_unconnected(std::int64_t now);
  void publish_traffic();
  void publish_status();
  // Publish the status, and add everything that can make progress to `set`.
  void wait_for(collective::WaitSet& set);

  // connections.cpp: the streams under the meshes.
  // Run `action` as the driver does, and return when it has run. Its exception reaches the caller.
  void run_driver_task(std::function<void()> action);
  // Run `action` on this thread where no thread drives; else the driver runs it later. `action` must not throw.
  void post_driver_task(std::function<void()> action);
  transport::Mesh& mesh_of(int lane);
  // Call `visit(socket, lane, peer, rail)` for each connection, in the driver.
  void for_each_connection(const std::function<void(transport::ResumableSocket&, int, int, int)>& visit);
  void connection_changed(int lane, int peer);
  // Call `action` for the mesh, the lane and each fallback mesh.
  template <class Action>
  void for_each_mesh(const Action& action) {
    action(*mesh_);
    action(transfers_.lane().mesh());
    for (const auto& fallback : fallback_meshes_) action(*fallback);
  }
  // Whether a connection would lose sent bytes if it closed now.
  bool has_unsent();
  void flush();

  // failure.cpp: the driver ends a failed group.
  collective::Failure timed_out(const Operation& operation) const;
  // Another rank gave up because a collective passed its deadline. If this rank is in the same collective with the same
  // timeout, the failure becomes a timeout here too: one cause has one name on all ranks.
  void share_timeout(collective::Failure& failure);
  // Take the reason of a lost peer from shared memory: the broken connection does not carry it.
  void read_failure_in_memory(collective::Failure& failure) const;
  // The first collective that this rank has not finished; it need not have been submitted.
  std::uint32_t first_unfinished() const;
  // A rank of this host that touches this rank's memory; -1: none.
  int user_of_memory() const;
  // Revoke this rank's memory. True: no rank touches it any more, or one has been stopped for longer than this rank
  // waits (set_revoke_wait), which `failure` then says. False: call again at look_at_users_ns_.
  bool reclaim_memory(std::int64_t now, collective::Failure& failure);
  void fail_all();

  Engine& engine_;
  Options options_;
  std::unique_ptr<transport::Mesh> mesh_;
  std::shared_ptr<const collective::HostMap> hosts_;
  Transfers transfers_;
  std::vector<std::unique_ptr<transport::Mesh>> fallback_meshes_;
  const bool needs_progress_;  // the pipes need polls to send what they took
  std::vector<std::unique_ptr<collective::SwitchPath>> switch_paths_;
  // The choice table for calls that a switch of the hardware profile cannot reduce; empty without such a switch.
  std::vector<collective::Choice> beyond_profile_;
  std::shared_ptr<transport::ShmNode> node_;  // shared with Engine::keep
  std::unique_ptr<collective::Shares> shares_;
  StatusPublisher status_;
  transport::Fd wake_;
  Inbox inbox_;

  // The driver's.
  std::deque<std::shared_ptr<Operation>> queue_;
  std::int64_t queue_deadline_ns_ = -1;  // no operation in the queue has an earlier deadline; -1: none has any
  std::vector<std::shared_ptr<Operation>> active_;  // by the order of their start
  std::int64_t oldest_since_ns_ = 0;                // when the first of `active_` became the first
  std::int64_t overdue_ns_ = 0;                     // when it posts the next AsyncEvent::Kind::overdue
  bool failure_names_operation_ = false;
  // Of a failed group.
  std::int64_t revoke_began_ns_ = -1;   // the start of the wait for ranks that touch this rank's memory
  std::int64_t look_at_users_ns_ = -1;  // during that wait: the time of the next look
  bool memory_is_used_ = false;         // after that wait
  std::int64_t linger_until_ns_ = -1;
  std::int64_t close_ns_ = -1;  // when the connections close
};

}  // namespace netfold::engine
