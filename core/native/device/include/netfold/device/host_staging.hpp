// Collectives on device memory through pinned host memory, in a pipeline of chunks.
//
// While one chunk is in the collective, one copy engine copies the next chunk from the device, and another copies the
// previous chunk back.
//
// Theory of operation. A slot is a pinned buffer for one chunk. A chunk goes through three stages:
//
//     leaving    copied out on the stream `out`, which waits for the slot's last copy back
//     running    the native collective; submitted once the host has seen the copy done
//     returned   copied in on the stream `back`; its event frees the slot
//
// Chunks leave, are submitted and return in the order of their calls, so all ranks submit in one order. Which stage
// moves first depends on this rank's device alone: a chunk returns as soon as its collective is done, and never waits
// for a copy of a later chunk. A later call's tensors may get their values only after an earlier call's result.
//
// One thread at a time runs the pipeline, in `run`, which never takes the GIL. Its waits have the deadline of the
// chunk's call, and end early when the group fails.
//
// Bounds: as many chunks under way as slots; one call whose chunks have not all left.
#pragma once

#include <netfold/device/cuda_driver.hpp>
#include <netfold/engine/group.hpp>

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace netfold::device {

class HostStaging {
 public:
  // Regions of a slot begin at multiples of this.
  static constexpr std::size_t kAlignBytes = 64;
  // A count that no `interrupt` comes after.
  static constexpr std::int64_t kNever = -1;

  // A contiguous tensor in device memory.
  struct Tensor {
    std::uint64_t address = 0;
    std::size_t bytes = 0;
    std::size_t element_bytes = 0;
  };
  struct Copies {
    bool to_host = false;    // before the collective
    bool to_device = false;  // after it
  };
  struct Request {
    collective::Call call;  // without buffers: kind, dtype, reduce, average, root
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    Copies of_inputs;
    Copies of_outputs;
    std::size_t elements = 0;     // of each tensor in a chunk; a chunk fits into a slot
    std::size_t chunks = 0;       // shorter tensors end earlier
    EventHandle ready = nullptr;  // recorded before: then the tensors hold their values, and may be written
    std::int64_t deadline_ns = 0;
  };
  // A call whose results are in place after `event`.
  struct Finished {
    std::uint64_t number = 0;
    std::shared_ptr<const Event> event;
  };
  // Why the pipeline ended. `number`: of the call, by `begin`.
  struct Fault {
    enum class Kind : std::uint8_t { overdue = 0, device = 1, operation = 2, group = 3 };
    Kind kind = Kind::device;
    std::uint64_t number = 0;
    std::string text;            // overdue: the action; device: the action and CUDA's error
    std::int64_t waited_ns = 0;  // overdue: since this chunk was the next to be submitted
    std::shared_ptr<const engine::Operation> operation;
  };
  enum class Goal : std::uint8_t {
    left = 0,       // all copies to the host are submitted
    submitted = 1,  // all collectives are submitted, too
    returned = 2,   // all copies to the device are submitted, too
    moved = 3,      // one chunk has moved to its next stage
  };
  struct Outcome {
    bool reached = false;
    std::vector<Finished> finished;
    std::optional<Fault> fault;
  };

  // slots: pinned memory, of equal sizes, at least one. out, back: streams of the driver's device.
  HostStaging(std::shared_ptr<engine::Group> group, std::shared_ptr<CudaDriver> driver, StreamHandle out,
              StreamHandle back, const std::vector<collective::Buffer>& slots);

  // Start a call, and return its number. `run` does the work. All chunks of the call before must have left.
  std::uint64_t begin(Request request);
  // Run until `goal` is reached, until a call is finished, or until a fault, which is the pipeline's last. After an
  // `interrupt` since the count `interrupts`, the goal `left` is enough in place of `returned`.
  Outcome run(Goal goal, std::int64_t interrupts = kNever);
  // From any thread.
  void interrupt() { interrupts_.fetch_add(1); }
  std::int64_t interrupts() const { return interrupts_.load(); }
  // Drop all chunks under way, once the group has failed. Returns when no collective uses a slot any more, after
  // kForgetNs at the latest.
  void forget();
  // Chunks are under way.
  bool busy() const { return call_ != nullptr || !leaving_.empty() || !running_.empty(); }

 private:
  struct Slot {
    collective::Buffer memory;
    std::shared_ptr<const Event> free;  // of the last copy from it to the device
  };
  // Part of a tensor, and its region in a slot.
  struct Part {
    std::uint64_t address = 0;
    collective::Buffer region;
  };
  // A call, as long as a chunk of it is under way.
  struct CallState {
    Request request;
    std::uint64_t number = 0;
    bool back_waits = false;  // the stream `back` waits for `ready`
  };
  struct Chunk {
    std::shared_ptr<CallState> of;
    std::size_t index = 0;
    Slot slot;
    std::vector<Part> inputs;
    std::vector<Part> outputs;
    std::shared_ptr<const Event> left;  // null: nothing is copied to the host, or the copy is done
    std::shared_ptr<engine::Operation> operation;
  };
  // Waits with pauses that grow, since the moment of the first.
  struct Waiting {
    int queries = 0;
    std::int64_t began_ns = 0;
    std::int64_t pause_ns = 0;
  };

  // Queries of an event before the thread sleeps between two queries, and the pauses.
  static constexpr int kSpinQueries = 50;
  static constexpr std::int64_t kShortestPauseNs = 20'000;
  static constexpr std::int64_t kLongestPauseNs = 1'000'000;
  static constexpr std::int64_t kForgetNs = 10'000'000'000;

  bool is_reached(Goal goal) const;
  bool advance(Outcome& outcome);
  void wait(Outcome& outcome, Waiting& waiting);
  void leave();
  // Whether the copies that the collective of a leaving chunk must come after are done.
  bool is_ready(Chunk& chunk);
  void submit(Chunk chunk);
  void finish(Chunk chunk, Outcome& outcome);
  void copy(const Chunk& chunk, bool to_host);

  std::shared_ptr<engine::Group> group_;
  std::shared_ptr<CudaDriver> driver_;
  StreamHandle out_;
  StreamHandle back_;
  std::size_t slot_bytes_ = 0;
  std::deque<Slot> slots_;  // not in use
  std::uint64_t calls_ = 0;
  std::atomic<std::int64_t> interrupts_{0};
  std::shared_ptr<CallState> call_;  // not all of its chunks have left; else null
  std::size_t next_chunk_ = 0;
  std::deque<Chunk> leaving_;
  std::deque<Chunk> running_;
  // For the text of an error: the last action on the device.
  struct Action {
    const char* what = "";
    std::uint64_t number = 0;
    std::size_t index = 0;
    std::size_t chunks = 0;
    std::size_t bytes = 0;
  };
  Action action_;
};

}  // namespace netfold::device
