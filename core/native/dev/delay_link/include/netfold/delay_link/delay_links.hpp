// Links with a delay: a frame that enters at one end leaves at the other after a fixed time, in order. `set_faults`
// makes a link duplicate some frames, and hold some frames longer than later ones.
//
// An end is a TAP interface in a network namespace, which exists as long as the link. A frame waits between the ends as
// the kernel handed it over, as an uncut GSO super-packet, so a gigabit costs a few thousand frames a second. One
// thread serves all links of a rack. Rates, losses and queues are the kernel's, at the interfaces.
//
// What must always hold: a frame leaves no earlier than its delay. Frames of one direction keep their order where no
// faults are set. A direction holds at most kMaxQueuedBytes; frames beyond are dropped and counted.
#pragma once

#include <netfold/transport/socket.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace netfold::delay_link {

// 10 Gbit/s for 25 ms.
constexpr std::size_t kMaxQueuedBytes = 32u << 20;

// Names the interface and the namespace that failed, and the reason.
struct DelayLinkError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Interface {
  std::string netns;  // a path: /run/netns/NAME
  std::string device;
};

// Faults of a link, drawn for each frame of each direction.
struct LinkFaults {
  double duplicate_ratio = 0;  // of frames; the copy has an extra delay of its own
  double reorder_ratio = 0;    // of frames, which have an extra delay of 1 ns to reorder_ns
  std::int64_t reorder_ns = 0;
};

class DelayLinks {
 public:
  DelayLinks();
  ~DelayLinks();
  DelayLinks(const DelayLinks&) = delete;
  DelayLinks& operator=(const DelayLinks&) = delete;

  // Makes both interfaces, in state down; returns the link's number. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN.
  // Precondition: not started. Throws DelayLinkError.
  std::size_t add(const Interface& one, const Interface& other, std::int64_t delay_ns);
  void start();
  // Sets the faults of that link from now on; from any thread. `seed` and the sequence of frames determine the draws.
  // Throws DelayLinkError for an unknown link or an invalid ratio.
  void set_faults(std::size_t link, const LinkFaults& faults, std::uint64_t seed);
  // Ends the thread; the destructor removes the interfaces.
  void stop();
  // Frames that were dropped because a direction was full, or because the other end refused them.
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
    std::deque<Frame> queue;  // by due_ns
    std::size_t queued_bytes = 0;
    LinkFaults faults{};
    std::uint64_t generator = 0;  // state
  };

  void run();
  void receive(Direction& direction);
  void enqueue(Direction& direction, std::size_t bytes, std::int64_t extra_ns);
  void release(Direction& direction, std::int64_t now_ns);

  std::vector<transport::Fd> taps_;
  std::deque<Direction> directions_;
  std::vector<std::byte> buffer_;
  transport::Fd epoll_;
  transport::Fd wake_;
  std::thread thread_;
  std::mutex faults_mutex_;  // guards faults and generator of every direction
  std::atomic<std::uint64_t> dropped_{0};
};

}  // namespace netfold::delay_link
