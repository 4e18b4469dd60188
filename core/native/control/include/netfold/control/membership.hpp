// A rank's membership of a job on a switch, without Python: join, watch the switch, learn which ranks left, leave.
//
// It does for NCCL's plugin what netfold/communicator/membership.py does for a group, over UDP. Both speak the same
// protocol, and a job may have ranks of both kinds.
//
// Always: nothing is sent to a switch whose certificate has another fingerprint than the address names;
// a token never leaves, and the credential that is made of it for one switch leaves only inside TLS; no error has a token
// or key; every wait has a deadline, but for the resolver's of a host name.
//
//   .venv/bin/python -m pytest core/tests/control
#pragma once

#include <netfold/auth/records.hpp>
#include <netfold/collective/channel.hpp>
#include <netfold/control/job_tree.hpp>
#include <netfold/control/switch_address.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace netfold::control {

// VERSION of netfold/switch_protocol/control_messages.py.
inline constexpr std::uint64_t kControlProtocolVersion = 10;

struct JoinRequest {
  SwitchAddress to;
  std::string token;       // as read_token returns it; empty: none. Needs a fingerprint in `to`
  std::string job;         // a digest that only the job's ranks know: 16 to 128 hexadecimal digits, used once
  std::string name;        // for the switch's log and metrics: up to 64 of [A-Za-z0-9_.:/+-]; may be empty
  int rank = 0;            // of this process, one of `ranks`
  std::vector<int> ranks;  // of all workers, in worker order, the same on every rank
  Value tree;              // the one of trees_of for this rank's switch; nil: all ranks join the same switch
  std::size_t window_bytes = 1 << 20;  // in flight; the job has the first rank's
  auth::Security security = auth::Security::none;
  std::int64_t timeout_ns = 60'000'000'000;  // until all ranks have joined; up to a day
};

// Asks the switch of `request` what is above it. Blocks and throws as Membership::join does; also throws
// std::runtime_error where a switch of the path has no keys, and the security is more than none.
PathToRoot query_path_to_root(const JoinRequest& request);

// Owns the control connection. Thread-safe. It has no thread of its own: the owner calls `poll`.
class Membership {
 public:
  // Joins; returns once all ranks have. Blocks for timeout_ns and 2 s at most: the switch reports a passed deadline
  // itself, with a better reason.
  // Throws std::runtime_error with one sentence that names rank and switch; std::invalid_argument for a request that no
  // switch would accept.
  static std::unique_ptr<Membership> join(const JoinRequest& request);
  // Closes the connection. To the other ranks that looks like a lost rank; call `leave` before.
  ~Membership();

  // The job's channel, with the keys and the port; a second call returns null. It outlives this object, if need be.
  std::unique_ptr<collective::Channel> take_channel();

  std::size_t payload_bytes() const { return payload_bytes_; }
  std::uint32_t window() const { return window_; }  // chunks of payload_bytes() in flight
  // Why the window is smaller than it should be, and what to set; else empty.
  const std::string& window_shortfall() const { return window_shortfall_; }
  bool authenticated() const { return authenticated_; }  // packets carry MACs
  bool encrypts() const { return encrypts_; }            // packets with values are encrypted
  // The switch, or another of its tree, has the hardware profile: the caller offers it only calls for which
  // collective::in_hardware_profile() holds. A switch that cannot reduce a call drops its packets.
  bool hardware() const { return hardware_; }

  // The end of the membership.
  struct Event {
    // lost: the switch is gone. left: a rank left while its contribution was needed.
    enum class Kind { lost, left } kind = Kind::lost;
    std::string reason;  // a sentence without this rank's number
    int rank = -1;       // left: the rank at fault
  };
  // Reads what the switch sent, and asks it whether it runs where that is due (switch_watch.hpp). Does not block, and
  // looks at the connection every kLookNs at most, so it may be called in every round of a busy loop. After an event it
  // returns that event again; after `leave`, nothing.
  // channel: the one of take_channel(), read and not kept. Its owner holds whatever guards it.
  // Call it every second or more often while the channel waits for a result. A pause longer than half a second counts
  // as half a second, so the switch is not taken for lost because nobody called.
  std::optional<Event> poll(std::int64_t now_ns, const collective::Channel& channel);
  static constexpr std::int64_t kLookNs = 20'000'000;

  // Ranks whose contribution the switch lacked when it was last asked about the oldest chunk. For errors.
  std::vector<int> stragglers() const;

  // Tells the switch why this rank leaves, for one second at most, and closes. Idempotent. fault: the rank at fault, -1
  // for none.
  void leave(std::string_view reason, int fault = -1);

 private:
  struct Connection;
  struct Departure {
    std::string reason;
    int fault = -1;
  };

  explicit Membership(std::unique_ptr<Connection> connection);
  void admit(const JoinRequest& request, std::int64_t deadline_ns);
  std::optional<Event> look(std::int64_t now_ns, const collective::Channel& channel);
  std::optional<Event> read();

  std::unique_ptr<Connection> connection_;
  std::unique_ptr<collective::Channel> channel_;
  std::size_t payload_bytes_ = 0;
  std::uint32_t window_ = 0;
  std::string window_shortfall_;
  bool authenticated_ = false;
  bool encrypts_ = false;
  bool hardware_ = false;

  std::atomic<std::int64_t> next_look_ns_{0};
  mutable std::mutex mutex_;  // guards the connection and the field below
  std::optional<Event> event_;
};

}  // namespace netfold::control
