// DelayLinks that take time: what goes in at one end comes out at the other a fixed delay later, in order.
// `disturb` makes a link duplicate some frames, and hold some longer than later ones.
//
// An end is a TAP interface that is made in a network namespace and is gone with the link. A frame waits here between
// the two as the kernel handed it over, a GSO super-packet uncut, so that a gigabit costs some thousand frames a
// second. One thread serves all links of a rack. Rates, losses and queues are the kernel's, at the interfaces.
//
// Uses nothing of ours. Always: a frame leaves no earlier than its delay; frames of one direction keep their order
// where no disturbance is set; a direction holds at most kMaxQueuedBytes, and what comes beyond is dropped and counted.
#pragma once

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

// Says which interface of which namespace could not be made, and why.
struct DelayLinkError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Interface {
  std::string netns;  // a path: /run/netns/NAME
  std::string device;
};

// Faults of a link, drawn for each frame of either direction.
struct LinkFaults {
  double duplicate_ratio = 0;  // of frames; a copy follows its frame after a hold of its own
  double reorder_ratio = 0;    // of frames; each is held longer, by 1 ns to reorder_ns
  std::int64_t reorder_ns = 0;
};

class DelayLinks {
 public:
  DelayLinks();
  ~DelayLinks();
  DelayLinks(const DelayLinks&) = delete;
  DelayLinks& operator=(const DelayLinks&) = delete;

  // Makes both interfaces, down; returns the link's number. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN. Not after start.
  // Throws DelayLinkError.
  std::size_t add(const Interface& one, const Interface& other, std::int64_t delay_ns);
  void start();
  // Sets what the link of that number does from now on, from any thread. The draws follow from `seed` and the frames
  // that come. Throws DelayLinkError where there is no such link, or a ratio is none.
  void set_faults(std::size_t link, const LinkFaults& faults, std::uint64_t seed);
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
    std::deque<Frame> queue;  // by due_ns
    std::size_t queued_bytes = 0;
    LinkFaults faults{};
    std::uint64_t drawn = 0;  // the generator's state
  };

  void run();
  void take(Direction& direction);
  void enqueue(Direction& direction, std::size_t bytes, std::int64_t extra_ns);
  void release(Direction& direction, std::int64_t now_ns);

  std::vector<int> taps_;
  std::deque<Direction> directions_;
  std::vector<std::byte> buffer_;
  int epoll_ = -1;
  int wake_ = -1;
  std::thread thread_;
  std::mutex faults_mutex_;  // guards disturbance and drawn of every direction
  std::atomic<std::uint64_t> dropped_{0};
};

}  // namespace netfold::delay_link
