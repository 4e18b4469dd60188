#include "comm.hpp"

#include <poll.h>
#include <netfold/transport/tcp/tcp_pipe.hpp>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "settings.hpp"

namespace netfold::nccl {
namespace {

using collective::Kind;
using transport::now_ns;
using transport::ResumableSocket;

// Both pipes of the mesh are there from the beginning.
class NoPipes final : public transport::PipeMaker {
 public:
  std::unique_ptr<transport::Pipe> make(int) override { throw std::logic_error("a comm has one pipe"); }
};

std::unique_ptr<transport::Mesh> mesh_of(int self, Connections connections, bool resumable,
                                         transport::fabric::FabricLane fabric,
                                         std::function<void(int rail, bool is_first)> on_broken) {
  std::unique_ptr<transport::PipeMaker> maker = std::make_unique<NoPipes>();
  std::unique_ptr<transport::Pipe> pipe = std::make_unique<transport::TcpPipe>(
      std::move(connections.sockets), connections.secrets, resumable, std::move(on_broken));
  if (fabric.mux != nullptr) {
    auto over_fabric = std::make_unique<transport::fabric::FabricPipeMaker>(std::move(fabric), std::move(maker));
    pipe = over_fabric->over(1 - self, std::move(pipe));
    maker = std::move(over_fabric);
  }
  std::vector<std::unique_ptr<transport::Pipe>> pipes(2);
  pipes[static_cast<std::size_t>(1 - self)] = std::move(pipe);
  return std::make_unique<transport::Mesh>(self, std::move(pipes), std::move(maker));
}

// A ticket holds the number of the request and of the message in it; the rest makes it unique.
constexpr int kRequestShift = 3;
constexpr int kCountShift = 8;
static_assert(kMaxReceives == 1 << kRequestShift && kMaxRequests == 1 << (kCountShift - kRequestShift));

}  // namespace

Comm::Comm(Role role, Id id, std::string peer, Connections connections, bool resumable,
           transport::fabric::FabricLane fabric, bool announces_always, std::function<void()> on_broken)
    : role_(role),
      id_(id),
      peer_(std::move(peer)),
      fabric_(fabric.mux),
      broken_since_ns_(connections.sockets.size()),
      lane_(mesh_of(static_cast<int>(role), std::move(connections), resumable, std::move(fabric),
                    [this, tell = std::move(on_broken)](int rail, bool) {
                      broken_since_ns_[static_cast<std::size_t>(rail)] = now_ns();
                      tell();
                    })) {
  if (announces_always) lane_.announce_always();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    requests_[i].comm_ = this;
    requests_[i].index_ = static_cast<int>(i);
  }
}

Comm::Request* Comm::free_request(int count) {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  const auto free = std::ranges::find(requests_, 0, &Request::count_);
  if (free == requests_.end()) return nullptr;
  free->count_ = free->left_ = count;
  free->bytes_ = {};
  return &*free;
}

void Comm::post(const Request& request, int which, Kind kind, std::byte* data, std::size_t bytes, int tag,
                transport::Pipe::GpuLease gpu) {
  collective::Call call;
  call.gpu = std::move(gpu);
  call.kind = kind;
  call.root = other();
  call.tag = tag;
  call.accepts_less = true;
  (kind == Kind::send ? call.inputs : call.outputs).push_back({data, bytes});
  const auto place = static_cast<std::uint64_t>(request.index_) << kRequestShift | static_cast<std::uint64_t>(which);
  lane_.post(++posted_ << kCountShift | place, call);
}

Comm::Request* Comm::send(std::byte* data, std::size_t bytes, int tag, const Registered* memory) {
  const std::lock_guard lock(mutex_);
  Request* request = free_request(1);
  if (request == nullptr) return nullptr;
  request->bytes_[0] = bytes;
  request->memory_[0] = memory;
  if (memory != nullptr && memory->mirror != nullptr && bytes > 0) {
    data = stage(*request, 0, *memory, data, bytes, [&](StagedMessage& message) { message.fetch(bytes); });
  }
  auto gpu = memory == nullptr ? nullptr : memory->gpu;
  if (request->is_staged_ || !unposted_.empty()) {
    unposted_.push_back({request, data, bytes, tag, std::move(gpu)});
  } else {
    post(*request, 0, Kind::send, data, bytes, tag, std::move(gpu));
  }
  progress();
  return request;
}

Comm::Request* Comm::receive(int count, void* const* data, const std::size_t* bytes, const int* tags,
                             const Registered* const* memory) {
  const std::lock_guard lock(mutex_);
  Request* request = free_request(count);
  if (request == nullptr) return nullptr;
  std::copy_n(memory, count, request->memory_.begin());
  std::array<std::byte*, kMaxReceives> into;
  for (int i = 0; i < count; ++i) {
    auto& place = into[static_cast<std::size_t>(i)] = static_cast<std::byte*>(data[i]);
    if (memory[i] == nullptr || memory[i]->mirror == nullptr || bytes[i] == 0) continue;
    place = stage(*request, i, *memory[i], place, bytes[i], [](StagedMessage& message) { message.expect(); });
  }
  for (int i = 0; i < count; ++i) {
    post(*request, i, Kind::receive, into[static_cast<std::size_t>(i)], bytes[i], tags[i],
         memory[i] == nullptr ? nullptr : memory[i]->gpu);
  }
  return request;
}

// Begins a staged message. Returns its place in the host's memory.
template <class Begin>
std::byte* Comm::stage(Request& request, int which, const Registered& memory, std::byte* data, std::size_t bytes,
                       Begin begin) {
  request.is_staged_ = true;
  try {
    StagedMessage& message = request.staged_[static_cast<std::size_t>(which)];
    message = {memory.mirror, reinterpret_cast<std::uintptr_t>(data), bytes};
    begin(message);
    return message.data();
  } catch (...) {
    end(request);
    throw;
  }
}

void Comm::end(Request& request) {
  if (std::exchange(request.is_staged_, false)) request.staged_ = {};
  request.flush_ = nullptr;
  request.memory_ = {};
  request.count_ = request.left_ = 0;
}

Comm::Request* Comm::flush(std::byte* data, const Registered& memory) {
  const std::lock_guard lock(mutex_);
  Request* request = free_request(1);
  if (request == nullptr) return nullptr;
  request->memory_[0] = &memory;
  try {
    request->flush_ = fabric_->flush(*memory.gpu, data);
  } catch (...) {
    end(*request);
    throw;
  }
  return request;
}

bool Comm::test(Request& request, int* sizes) {
  const std::lock_guard lock(mutex_);
  if (request.flush_ != nullptr) {
    try {
      if (!failure_.empty()) throw std::runtime_error(failure_);
      if (!fabric_->is_flushed(*request.flush_)) return false;
    } catch (const transport::fabric::Error& error) {
      fail(error.what());
      throw std::runtime_error(failure_);
    }
    end(request);
    return true;
  }
  if (request.left_ > 0 || has_unsent_) progress();
  // A record that no call sends on would wait for the next request.
  if (request.left_ > 0 || has_unsent_ || !is_copied(request)) {
    if (!failure_.empty()) throw std::runtime_error(failure_);
    return false;
  }
  for (int i = 0; sizes != nullptr && i < request.count_; ++i) {
    sizes[i] = static_cast<int>(request.bytes_[static_cast<std::size_t>(i)]);
  }
  end(request);
  return true;
}

// The n-th message with a tag is the n-th send with it, so that none overtakes another.
void Comm::post_sends() {
  while (!unposted_.empty() && unposted_.front().request->staged_[0].is_done()) {
    const Unposted& next = unposted_.front();
    post(*next.request, 0, Kind::send, next.data, next.bytes, next.tag, next.gpu);
    unposted_.pop_front();
  }
}

// Begins the copies of what arrived to the GPU.
void Comm::bring(Request& request) {
  if (!request.is_staged_) return;
  for (std::size_t i = 0; i < request.staged_.size(); ++i) {
    if (request.staged_[i]) request.staged_[i].bring(request.bytes_[i]);
  }
}

bool Comm::is_copied(Request& request) {
  try {
    return std::ranges::all_of(request.staged_, &StagedMessage::is_done);
  } catch (const device::CudaError& error) {
    fail(error.what());
    return false;
  }
}

void Comm::take_done() {
  for (const auto& done : lane_.take_done()) {
    Request& request = requests_[done.ticket >> kRequestShift & (kMaxRequests - 1)];
    if (role_ == Role::receiver) request.bytes_[done.ticket & (kMaxReceives - 1)] = done.received;
    if (--request.left_ == 0 && role_ == Role::receiver) bring(request);
  }
}

void Comm::progress() {
  if (!failure_.empty()) return;
  try {
    post_sends();
    const auto result = lane_.poll();
    take_done();
    if (result == collective::Progress::failed) fail(lane_.fault()->failure.text);
  } catch (const device::CudaError& error) {
    fail(error.what());
  }
  has_unsent_ = !lane_.mesh().flush();
}

void Comm::fail(const std::string& why) {
  failure_ =
      (role_ == Role::sender ? "sending to " : "receiving from ") + peer_ + " (rank 0 sends, rank 1 receives): " + why;
  lane_.mesh().cancel(kCancelNs);
  release();  // NCCL may free the requests' memory when it learns of the failure
}

void Comm::deregister(const Registered& memory) {
  const std::lock_guard lock(mutex_);
  bool is_used = false;
  for (Request& request : requests_) {
    const auto named = std::ranges::find(request.memory_, &memory);
    if (named == request.memory_.end()) continue;
    is_used = true;
    std::ranges::replace(request.memory_, &memory, nullptr);
  }
  // A staged message keeps its mirror.
  if (!is_used || memory.mirror != nullptr || !failure_.empty()) return;
  fail("NCCL took back the registration of memory that a request used");
}

void Comm::release() {
  for (const Request& request : requests_) {
    if (request.flush_ != nullptr) fabric_->end_flush(*request.flush_);
  }
  lane_.release_memory();
}

void Comm::release_memory() {
  const std::lock_guard lock(mutex_);
  release();
}

bool Comm::is_over() {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

std::optional<Comm::Broken> Comm::broken_locked(int rail) {
  const ResumableSocket& connection = socket(rail);
  if (!connection.is_broken()) return std::nullopt;
  return Broken{connection.received(), connection.reconnects(), broken_since_ns_[static_cast<std::size_t>(rail)]};
}

std::optional<Comm::Broken> Comm::broken(int rail) {
  const std::lock_guard lock(mutex_);
  return broken_locked(rail);
}

std::optional<Comm::Broken> Comm::disconnect(int rail, int reconnects) {
  const std::int64_t until_ns = now_ns() + ResumableSocket::kLastNs;
  for (;;) {
    transport::Fd readable;
    {
      const std::lock_guard lock(mutex_);
      ResumableSocket& connection = socket(rail);
      if (reconnects != kAny && connection.reconnects() > reconnects) return broken_locked(rail);
      connection.begin_disconnect();
      if (!connection.is_disconnecting()) return broken_locked(rail);
      if (connection.drain() || now_ns() >= until_ns) {
        connection.end_disconnect();
        return broken_locked(rail);
      }
      readable = connection.duplicate_socket();
    }
    pollfd more{readable.get(), POLLIN, 0};
    ::poll(&more, 1, static_cast<int>((until_ns - now_ns()) / 1'000'000 + 1));
  }
}

bool Comm::reconnect(int rail, int reconnects, transport::Fd fd, const Agreed& agreed) {
  const std::lock_guard lock(mutex_);
  ResumableSocket& connection = socket(rail);
  if (connection.reconnects() != reconnects) return false;
  if (!connection.reconnect(std::move(fd), agreed.received, agreed.secrets)) return false;
  broken_since_ns_[static_cast<std::size_t>(rail)] = 0;
  // Messages go on by NCCL's next call. No other thread may use a request's memory: NCCL may have freed it.
  has_unsent_ = !lane_.mesh().flush();
  return true;
}

void Comm::give_up(int rail, int reconnects, const std::string& why) {
  const std::lock_guard lock(mutex_);
  ResumableSocket& connection = socket(rail);
  if (!connection.is_broken() || connection.reconnects() != reconnects) return;
  connection.give_up(why);
}

void Comm::look() {
  const std::lock_guard lock(mutex_);
  lane_.mesh().hung_up(other());
  // The last bytes may say that the other end left: then there is nothing to make again.
  bool is_broken = false;
  for (int rail = 0; rail < rails(); ++rail) is_broken |= socket(rail).is_broken();
  if (!is_broken || role_ != Role::sender || !lane_.has_left(other())) return;
  for (int rail = 0; rail < rails(); ++rail) socket(rail).give_up("it closed the connection", true);
}

void Comm::leave() {
  {
    const std::lock_guard lock(mutex_);
    collective::Failure left;
    left.kind = collective::Failure::Kind::aborted;
    left.text = "it closed the connection";
    left.orderly = true;
    lane_.abort(left);
    lane_.mesh().cancel(kCancelNs);
    unposted_.clear();
  }
  for (Request& request : requests_) {
    while (is_copying(request)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool Comm::is_copying(Request& request) {
  const std::lock_guard lock(mutex_);
  try {
    if (std::ranges::any_of(request.staged_, &StagedMessage::is_copying)) return true;
  } catch (const device::CudaError& error) {
    warn("a message with " + peer_ + ": " + error.what());
    for (const StagedMessage& message : request.staged_) message.abandon();
  }
  request.staged_ = {};
  return false;
}

bool Comm::has_arrived() {
  const std::lock_guard lock(mutex_);
  lane_.mesh().flush();
  return !lane_.mesh().has_unsent() && !lane_.unconfirmed();
}

}  // namespace netfold::nccl
