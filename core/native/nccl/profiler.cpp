// The functions of NCCL's profiler interface, and the thread that writes a profile.
//
// On only where NETFOLD_PROFILE names a folder. Without it the profiler asks for no events: NCCL finds these tables
// whenever it loads the network plugin. No exception leaves a function, and no error of a recording reaches the job.
#include <pthread.h>
#include <unistd.h>
#include <netfold/transport/condition.hpp>
#include <netfold/transport/socket.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <netfold/nccl/profiler_interface.hpp>
#include "assembler.hpp"
#include "event_rings.hpp"
#include "names.hpp"
#include "profile_files.hpp"

namespace netfold::nccl {
namespace {

using std::chrono::milliseconds;

constexpr auto kWriteEvery = milliseconds(50);
constexpr auto kDescribeEvery = milliseconds(500);
// NCCL's thread waits for the last records of its communicator, and the process's end for those of all.
constexpr std::int64_t kMostWaitNs = 2'000'000'000;
constexpr std::size_t kMostComms = 1 << 16;
constexpr unsigned long kInit = 0x1;
constexpr int kMask = event_type::kCollective | event_type::kPointToPoint | event_type::kProxyOperation |
                      event_type::kProxyStep | event_type::kKernelChannel | event_type::kNetPlugin |
                      event_type::kGroupApi | event_type::kCollectiveApi | event_type::kPointToPointApi |
                      event_type::kKernelLaunch;

class Recorder {
 public:
  // Never destroyed: threads of NCCL may come after the process's static objects are gone.
  static Recorder& instance() {
    static auto* made = new Recorder;
    return *made;
  }

  // A context, which NCCL gives back with each event's start; null: no events are wanted.
  void* join(const CommAbout& comm, int interface, int* mask, Logger logger) {
    *mask = 0;
    const char* run = std::getenv("NETFOLD_PROFILE");
    if (run == nullptr || *run == '\0') return nullptr;
    const std::lock_guard lock(mutex_);
    logger_ = logger;
    if (state_ == State::idle) begin(run, interface);
    if (state_ != State::recording || about_.comms.size() >= kMostComms) return nullptr;
    about_.comms.push_back(comm);
    has_news_ = true;
    mask_ = mask;
    *mask = interface >= 6 ? kMask | event_type::kCopyEngineCollective : kMask;
    return &contexts_.emplace_back(static_cast<std::uint32_t>(about_.comms.size() - 1));
  }

  bool is_recording() const { return is_recording_.load(std::memory_order_relaxed); }
  EventRings& rings() { return rings_; }
  int pid() const { return pid_; }

  void leave(std::uint32_t comm) {
    if (!is_recording()) return;
    Event event;
    event.kind = Event::Kind::comm_ended;
    event.comm = comm;
    rings_.push(event);
    std::unique_lock lock(mutex_);
    const std::uint64_t wanted = ++flushes_wanted_;
    rings_.wake();
    changed_.wait_until(lock, transport::now_ns() + kMostWaitNs,
                        [&] { return flushes_done_ >= wanted || state_ != State::recording; });
  }

  // At the process's end.
  void end() {
    if (!is_recording()) return;
    std::unique_lock lock(mutex_);
    if (state_ != State::recording) return;
    state_ = State::ending;
    rings_.wake();
    changed_.wait_until(lock, transport::now_ns() + kMostWaitNs, [&] { return state_ == State::ended; });
  }

  // In the child of a fork there is no writing thread, and the files are the parent's.
  void forget() { is_recording_.store(false, std::memory_order_relaxed); }

 private:
  enum class State { idle, recording, ending, ended };

  void begin(const char* run, int interface) {
    try {
      files_ = std::make_unique<ProfileFiles>(run);
      about_.interface = interface;
      files_->describe(about_);
      std::thread([this] { write_until_end(); }).detach();
      state_ = State::recording;
      is_recording_.store(true);
      std::atexit([] { instance().end(); });
      pthread_atfork(nullptr, nullptr, [] { instance().forget(); });
      log(kInfo, "records NCCL's operations into " + files_->folder());
    } catch (const std::exception& error) {
      fail(error);
    }
  }

  // The lock is held.
  void fail(const std::exception& error) {
    state_ = State::ended;
    is_recording_.store(false);
    if (mask_ != nullptr) __atomic_store_n(mask_, 0, __ATOMIC_RELAXED);
    log(kWarn, std::string("the profile ends here, the job goes on: ") + error.what() +
                   "; set NETFOLD_PROFILE to a folder that can be written");
  }

  void log(int level, const std::string& text) {
    if (logger_ != nullptr) logger_(level, kInit, __FILE__, __LINE__, "PROFILER/netfold: %s", text.c_str());
  }

  void write_until_end() {
    auto described = std::chrono::steady_clock::now();
    for (;;) {
      rings_.wait(kWriteEvery);
      std::unique_lock lock(mutex_);
      if (state_ == State::ended) return;
      const bool is_last = state_ == State::ending;
      const std::uint64_t flushes = flushes_wanted_;
      lock.unlock();
      try {
        const std::int64_t now_ns = transport::now_ns();
        // An event is merged once no earlier one can come, which takes this long.
        if (flushes > flushes_done_) std::this_thread::sleep_for(milliseconds(1));
        for (const Event& event : rings_.take(is_last)) assembler_.add(event);
        assembler_.settle(now_ns, is_last);
        const std::uint64_t dropped = rings_.dropped() + assembler_.refused;
        lock.lock();
        const bool is_new = dropped != about_.dropped_events || assembler_.unknown != about_.unknown_events;
        const bool is_due = std::chrono::steady_clock::now() - described >= kDescribeEvery;
        std::optional<ProfileAbout> about;
        // A communicator is described before its first record.
        if (is_last || has_news_ || (is_new && (is_due || flushes > flushes_done_))) {
          about_.dropped_events = dropped;
          about_.unknown_events = assembler_.unknown;
          has_news_ = false;
          about = about_;
        }
        lock.unlock();
        if (about) files_->describe(*about);
        if (about) described = std::chrono::steady_clock::now();
        files_->append(assembler_.operations, assembler_.transfers);
        assembler_.operations.clear();
        assembler_.transfers.clear();
        if (is_last) {
          about->has_ended = true;
          files_->describe(*about);
        }
        lock.lock();
      } catch (const std::exception& error) {
        if (!lock.owns_lock()) lock.lock();
        fail(error);
      }
      flushes_done_ = flushes;
      if (is_last) state_ = State::ended;
      changed_.notify_all();
      if (state_ == State::ended) return;
    }
  }

  std::mutex mutex_;  // no function of an event takes it
  transport::Condition changed_;
  State state_ = State::idle;
  std::atomic<bool> is_recording_{false};
  const int pid_ = ::getpid();
  Logger logger_ = nullptr;
  int* mask_ = nullptr;  // NCCL's, which lives as long as the process
  std::deque<std::uint32_t> contexts_;
  ProfileAbout about_;
  bool has_news_ = false;
  std::uint64_t flushes_wanted_ = 0, flushes_done_ = 0;
  EventRings rings_;
  // The writing thread's.
  Assembler assembler_;
  std::unique_ptr<ProfileFiles> files_;
};

void* handle_of(std::uint64_t id) { return reinterpret_cast<void*>(id); }
std::uint64_t id_of(void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

// False: the event is not of interest.
template <int kVersion>
bool describe(const EventDescription& from, Event& event) {
  event.type = static_cast<std::int32_t>(kVersion == 4 ? from.type & 0xff : from.type);
  event.parent = id_of(from.parent);
  switch (event.type) {
    case event_type::kGroupApi:
    case event_type::kCollectiveApi:
    case event_type::kPointToPointApi:
    case event_type::kKernelLaunch:
    case event_type::kProxyStep:
      return true;
    case event_type::kCollective:
      event.value = from.collective.count;
      event.sequence = from.collective.sequence;
      event.peer = from.collective.root;
      event.channels = from.collective.channels;
      event.function = number_of(kFunctions, from.collective.function);
      event.dtype = number_of(kDtypes, from.collective.dtype);
      event.algorithm = number_of(kAlgorithms, from.collective.algorithm);
      event.protocol = number_of(kProtocols, from.collective.protocol);
      return true;
    case event_type::kPointToPoint:
      event.value = from.point_to_point.count;
      event.peer = from.point_to_point.peer;
      event.channels = kVersion == 4 ? 0 : from.point_to_point.channels;
      event.function = number_of(kFunctions, from.point_to_point.function);
      event.dtype = number_of(kDtypes, from.point_to_point.dtype);
      return true;
    case event_type::kCopyEngineCollective:
      event.value = from.copy_engine_collective.count;
      event.sequence = from.copy_engine_collective.sequence;
      event.peer = from.copy_engine_collective.root;
      event.function = number_of(kFunctions, from.copy_engine_collective.function);
      event.dtype = number_of(kDtypes, from.copy_engine_collective.dtype);
      event.algorithm = kCopyEngine;
      return true;
    case event_type::kProxyOperation:
      // The operation of another process, for which this one sends: the handle means nothing here.
      if (from.proxy_operation.pid != Recorder::instance().pid()) event.parent = 0;
      event.channels = from.proxy_operation.channel;
      event.peer = from.proxy_operation.peer;
      event.is_send = from.proxy_operation.is_send != 0;
      return true;
    case event_type::kKernelChannel:
      event.channels = from.kernel_channel.channel;
      event.value = from.kernel_channel.gpu_ns;
      return true;
    case event_type::kNetPlugin:
      if (from.net_plugin.id != kNetfoldEvents || from.net_plugin.data == nullptr) return false;
      event.value = static_cast<const NetEvent*>(from.net_plugin.data)->bytes;
      event.is_send = static_cast<const NetEvent*>(from.net_plugin.data)->is_send != 0;
      return true;
    default:
      return false;
  }
}

template <int kVersion>
Result start_event(void* context, void** handle, EventDescription* description) {
  *handle = nullptr;
  Recorder& recorder = Recorder::instance();
  Event event;
  if (context == nullptr || !recorder.is_recording() || !describe<kVersion>(*description, event)) {
    return Result::success;
  }
  event.comm = *static_cast<const std::uint32_t*>(context);
  event.id = recorder.rings().next_id();
  if (event.id != 0 && recorder.rings().push(event)) *handle = handle_of(event.id);
  return Result::success;
}

Result stop_event(void* handle) {
  Recorder& recorder = Recorder::instance();
  if (handle == nullptr || !recorder.is_recording()) return Result::success;
  Event event;
  event.kind = Event::Kind::stop;
  event.id = id_of(handle);
  recorder.rings().push(event);
  return Result::success;
}

Result record_state(void* handle, int state, StateArguments* arguments) {
  Recorder& recorder = Recorder::instance();
  if (handle == nullptr || !recorder.is_recording()) return Result::success;
  Event event;
  event.kind = Event::Kind::state;
  event.id = id_of(handle);
  event.type = state;
  switch (state) {
    case event_state::kSendGpuWait:
    case event_state::kSendPeerWait:
    case event_state::kSendWait:
    case event_state::kReceiveWait:
    case event_state::kReceiveFlushWait:
    case event_state::kReceiveGpuWait:
      event.value = arguments == nullptr ? 0 : arguments->step_bytes;
      break;
    case event_state::kKernelStop:
      event.value = arguments == nullptr ? 0 : arguments->gpu_ns;
      break;
    case event_state::kNetUpdate:
      if (arguments == nullptr || arguments->net_data == nullptr) return Result::success;
      event.value = static_cast<const NetEvent*>(arguments->net_data)->bytes;
      break;
    default:
      return Result::success;
  }
  recorder.rings().push(event);
  return Result::success;
}

Result finalize(void* context) {
  if (context != nullptr) Recorder::instance().leave(*static_cast<const std::uint32_t*>(context));
  return Result::success;
}

Result init(int version, void** context, int* mask, const char* name, std::uint64_t comm, int nodes, int ranks,
            int rank, Logger logger) {
  *context = nullptr;
  try {
    const CommAbout about{comm, name == nullptr ? "" : name, nodes, ranks, rank};
    *context = Recorder::instance().join(about, version, mask, logger);
  } catch (const std::exception&) {  // no memory: the job goes on without a profile
    *mask = 0;
  }
  return Result::success;
}

template <int kVersion>
constexpr ProfilerV5 table_v5() {
  return {"netfold",
          [](void** context, std::uint64_t comm, int* mask, const char* name, int nodes, int ranks, int rank,
             Logger logger) { return init(kVersion, context, mask, name, comm, nodes, ranks, rank, logger); },
          {start_event<kVersion>, stop_event, record_state, finalize}};
}

}  // namespace
}  // namespace netfold::nccl

#define NETFOLD_EXPORTED extern "C" __attribute__((visibility("default"))) const

using namespace netfold::nccl;

NETFOLD_EXPORTED ProfilerV4 ncclProfiler_v4{
    "netfold",
    [](void** context, int* mask, const char* name, std::uint64_t comm, int nodes, int ranks, int rank, Logger logger) {
      return init(4, context, mask, name, comm, nodes, ranks, rank, logger);
    },
    {start_event<4>, stop_event, record_state, finalize}};
NETFOLD_EXPORTED ProfilerV5 ncclProfiler_v5 = table_v5<5>();
NETFOLD_EXPORTED ProfilerV5 ncclProfiler_v6 = table_v5<6>();
