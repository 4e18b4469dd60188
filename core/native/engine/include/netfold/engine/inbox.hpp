// The state that threads of a group share, under one lock: work for the driver, the driver's role, and what the driver
// publishes.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/shares.hpp>
#include <netfold/engine/operation.hpp>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/condition.hpp>

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace netfold::engine {

// The thread that polls a group's algorithms: at most one at a time.
enum class Driver : std::uint8_t { none, engine, caller };

// Counters of one channel to a switch.
struct Traffic {
  std::uint64_t generation = 0;  // of the membership; 0: the switch is lost
  std::uint64_t packets_sent = 0;
  std::uint64_t retransmissions = 0;
  std::int64_t smoothed_rtt_ns = 0;
  std::uint64_t oldest_outstanding = 0;
  bool idle = true;
  std::string path_error;  // why nothing reaches the switch, where known
  std::string send_error;  // the last packet to the switch that this host refused, and why
  std::uint64_t drops[protocol::kDropCount] = {};
};

// A group's shared state. `lock` is the only access to the state, and holds the mutex while its result lives.
class Inbox {
 public:
  static constexpr std::size_t kRecentCalls = 16;

  struct State {
    // For the driver.
    std::deque<std::shared_ptr<Operation>> submitted;
    std::vector<std::function<void()>> tasks;
    bool needs_flush = false;  // a reconnected stream must retransmit, or a pipe needs progress

    Driver driver = Driver::none;
    bool engine_sleeps = false;  // the engine thread drives and sleeps: a caller may take over
    int waiting = 0;             // threads that wait while another thread drives

    collective::Failure failure;
    bool closed = false;  // all connections are closed

    std::uint32_t next_sequence = 1;
    std::uint32_t next_transfer = 1;  // apart from collectives: ranks differ in the number of their transfers
    std::array<collective::MessageHeader, kRecentCalls> recent_calls;

    // Published by the driver.
    EventLog events;
    std::vector<Traffic> traffic;  // by the order of attaching
    std::optional<collective::Shares> shares;

    bool can_take_over() const { return driver == Driver::none || (driver == Driver::engine && engine_sleeps); }
    // Neither operations nor tasks wait for the driver.
    bool empty() const { return submitted.empty() && tasks.empty(); }
  };

  template <class Held>
  struct Locked : std::unique_lock<std::mutex> {
    Held& state;
    Held* operator->() const { return &state; }
  };
  Locked<State> lock() { return {std::unique_lock(mutex_), state_}; }
  Locked<const State> lock() const { return {std::unique_lock(mutex_), state_}; }

  // Give up the driver's role. Wakes threads in wait_until.
  void release_driver(Locked<State>& held) {
    held->driver = Driver::none;
    driver_left_.notify_all();
  }
  // Unlock until a driver leaves and `condition` holds.
  template <class Condition>
  void wait_until(Locked<State>& held, Condition condition) {
    driver_left_.wait(held, condition);
  }

 private:
  mutable std::mutex mutex_;
  transport::Condition driver_left_;
  State state_;
};

}  // namespace netfold::engine
