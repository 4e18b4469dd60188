// One direction between two processes, as NCCL has it: one end sends messages with tags, the other receives them, and
// both ask whether a request is done. The messages go by collective/point_to_point.hpp over TCP connections that
// reconnect (transport/tcp/resumable_socket.hpp), or over a fabric's stream beside such a connection.
//
// A message from memory of a GPU is copied to the host first, and handed on once it is there; later messages of the comm
// wait behind it. A message to memory of a GPU is copied there after it arrived (staging.hpp).
//
// A fabric's adapter that reaches GPUs reads and writes their memory itself, and nothing is copied. A flush
// makes its writes visible before NCCL's kernel reads them.
//
// NCCL calls from one thread at a time. The endpoint's threads look for broken connections and make them again; a lock
// is between them.
#pragma once

#include <netfold/collective/point_to_point.hpp>
#include <netfold/transport/fabric/fabric_pipe.hpp>

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <netfold/nccl/interface.hpp>
#include "reconnectable.hpp"
#include "staging.hpp"

namespace netfold::nccl {

inline constexpr int kMaxReceives = 8;  // in one request

class Comm;

// Memory that NCCL has registered with a comm. One of the other fields is set.
struct Registered {
  std::weak_ptr<Comm> comm;
  transport::Pipe::RegistrationLease lease;  // of the host's memory, by a fabric
  transport::Pipe::GpuLease gpu;             // of a GPU's memory, by a fabric
  std::shared_ptr<Mirror> mirror;            // of a GPU's memory
};

struct Connections {  // of one handshake's Hello::comm, by rail
  Id id{};
  std::vector<transport::Fd> sockets;
  std::vector<auth::StreamSecrets> secrets;
};

class Comm final : public Reconnectable {
 public:
  enum class Role : int { sender = 0, receiver = 1 };

  class Request {
   public:
    Comm& comm() const { return *comm_; }
    // The profiler's, of each message; null: none.
    std::array<void*, kMaxReceives> events{};

   private:
    friend class Comm;
    Comm* comm_ = nullptr;
    int index_ = 0;
    int count_ = 0;  // of messages; 0: the request is free
    int left_ = 0;
    std::array<std::size_t, kMaxReceives> bytes_{};
    std::array<StagedMessage, kMaxReceives> staged_{};
    bool is_staged_ = false;                                // one of them is in use
    std::array<const Registered*, kMaxReceives> memory_{};  // of each message, and of a flush; null: none
    std::shared_ptr<transport::fabric::GpuFlush> flush_;    // null: the request is of messages
  };

  // peer: how messages name the other end, "10.0.0.2:7301".
  // resumable: a connection that breaks may be made again, so that a copy of what was sent is kept.
  // fabric: carries the messages; without a mux the connections do.
  // announces_always: see PointToPoint.
  // on_broken: called, under the lock, when a connection is found to be broken.
  Comm(Role role, Id id, std::string peer, Connections connections, bool resumable,
       transport::fabric::FabricLane fabric, bool announces_always, std::function<void()> on_broken);

  const Id& id() const override { return id_; }
  Role role() const { return role_; }
  // Null: the comm is not on a fabric.
  const std::shared_ptr<transport::fabric::StreamMux>& fabric() const { return fabric_; }
  const std::string& peer() const override { return peer_; }

  // Borrow the memory until the request is done. memory: the registered memory that holds it; null: it is the host's.
  // Null: all requests are in use.
  Request* send(std::byte* data, std::size_t bytes, int tag, const Registered* memory);
  // The n-th message with tags[n]; it may be shorter than bytes[n].
  Request* receive(int count, void* const* data, const std::size_t* bytes, const int* tags,
                   const Registered* const* memory);
  // Makes what was received into memory of a GPU visible to the GPU. Null: all requests are in use.
  Request* flush(std::byte* data, const Registered& memory);
  // NCCL takes a registration back. The comm fails where a request is open that uses it, as where a job was aborted: NCCL
  // frees the memory next, before it closes the comm.
  void deregister(const Registered& memory);
  // True: the request is done and free. sizes: of the messages. Throws std::runtime_error once the comm has failed.
  bool test(Request& request, int* sizes);

  bool has_dialled() const override { return role_ == Role::sender; }
  int rails() const override { return static_cast<int>(broken_since_ns_.size()); }
  bool is_over() override;
  std::optional<Broken> broken(int rail) override;
  std::optional<Broken> disconnect(int rail, int reconnects) override;
  bool reconnect(int rail, int reconnects, transport::Fd socket, const Agreed& agreed) override;
  void give_up(int rail, int reconnects, const std::string& why) override;
  void look() override;
  bool has_arrived() override;

  // Tells the other end that this one leaves. No peer, provider or copy uses a request's memory any more when it
  // returns; where a GPU does not end its copies, NCCL's log says so.
  void leave();
  // After `leave`: forgets all requests and what they hold. Blocks until the adapter has ended its reads.
  void release_memory();

 private:
  // For the other end to end its writes: its adapter moves only while NCCL calls, or its thread has a core.
  static constexpr std::int64_t kCancelNs = 1'000'000'000;

  struct Unposted {
    Request* request;
    std::byte* data;
    std::size_t bytes;
    int tag;
    transport::Pipe::GpuLease gpu;
  };

  template <class Begin>
  std::byte* stage(Request& request, int which, const Registered& memory, std::byte* data, std::size_t bytes,
                   Begin begin);
  void post_sends();
  void take_done();
  void bring(Request& request);
  bool is_copied(Request& request);
  bool is_copying(Request& request);
  void end(Request& request);
  void fail(const std::string& why);
  void release();
  Request* free_request(int count);
  void post(const Request& request, int which, collective::Kind kind, std::byte* data, std::size_t bytes, int tag,
            transport::Pipe::GpuLease gpu);
  void progress();
  transport::ResumableSocket& socket(int rail) { return *lane_.mesh().rail(other(), rail); }
  int other() const { return 1 - static_cast<int>(role_); }
  std::optional<Broken> broken_locked(int rail);

  const Role role_;
  const Id id_;
  const std::string peer_;
  const std::shared_ptr<transport::fabric::StreamMux> fabric_;
  std::mutex mutex_;
  std::vector<std::int64_t> broken_since_ns_;  // by rail; 0: it is not
  collective::PointToPoint lane_;
  std::array<Request, kMaxRequests> requests_;
  std::deque<Unposted> unposted_;  // sends behind a copy to the host, at most kMaxRequests
  std::uint64_t posted_ = 0;
  bool has_unsent_ = false;
  std::string failure_;
};

}  // namespace netfold::nccl
