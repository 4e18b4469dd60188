// Cables that take time: what goes in at one end comes out at the other a fixed delay later, in order.
//
// An end is a TAP interface that is made in a network namespace and is gone with the cable. A frame waits here between
// the two as the kernel handed it over, a GSO super-packet uncut, so that a gigabit costs some thousand frames a
// second. One thread serves all cables of a rack. Rates, losses and queues are the kernel's, at the interfaces.
//
// Uses nothing of ours. Always: a frame leaves no earlier than its delay; frames of one direction keep their order; a
// direction holds at most kMostHeldBytes, and what comes beyond is dropped and counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace netfold::cable {

// 10 Gbit/s for 25 ms.
constexpr std::size_t kMostHeldBytes = 32u << 20;

// Says which interface of which namespace could not be made, and why.
struct CableError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct End {
  std::string netns;  // a path: /run/netns/NAME
  std::string device;
};

class Cables {
 public:
  Cables();
  ~Cables();
  Cables(const Cables&) = delete;
  Cables& operator=(const Cables&) = delete;

  // Makes both interfaces, down. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN. Not after start. Throws CableError.
  void add(const End& one, const End& other, std::int64_t delay_ns);
  void start();
  // Ends the thread; the interfaces go with this object.
  void stop();
  // Frames that were dropped because a direction held too much, or the other end took none.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Frame {
    std::int64_t due_ns;
    std::size_t bytes;
    std::unique_ptr<std::byte[]> data;
  };
  struct Direction {
    int from;
    int to;
    std::int64_t delay_ns;
    std::deque<Frame> held;
    std::size_t held_bytes = 0;
  };

  void run();
  void take(Direction& direction);
  void let_go(Direction& direction, std::int64_t now_ns);

  std::vector<int> taps_;
  std::deque<Direction> directions_;
  std::vector<std::byte> buffer_;
  int epoll_ = -1;
  int bell_ = -1;
  std::thread thread_;
  std::atomic<std::uint64_t> dropped_{0};
};

}  // namespace netfold::cable
