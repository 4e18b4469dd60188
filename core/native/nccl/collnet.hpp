// A collective communicator of NCCL (CollNet): operations of several ranks, through netfold's switch.
//
// NCCL makes one for each network device of a communicator, with one rank of each host, and its channels share it. It
// calls `connect` on all ranks at once, then starts operations from one thread, in the same order on every rank, and
// asks for each whether it is done.
//
// A communicator is an engine::Group: its driver's thread moves all operations, which stream through one window to the
// switch. Beside the switch the ranks have connections among themselves (rank_connections.hpp), so that
//
// - `connect` is all or nothing. The ranks agree twice: that each can go on, and that each has joined the switch. Where
//   one has not, there is no communicator on any rank, NCCL's log has one line on each, and NCCL goes on with its own
//   algorithms over its network. A rank alone could not decide that: NCCL compares the ranks of one host only.
// - the ranks measure the switch and a ring before the first operation (measure.hpp), and cut an all_reduce into a part
//   for each where that is faster (collective/split.cpp). all_gather and reduce_scatter go through the switch up to the
//   size from which a ring is faster.
// - a lost switch costs no operation (recovery.hpp): NCCL has no way to take another algorithm for one that has begun.
//
// A rank that dies breaks its connections. Where they are not made again within NETFOLD_RECONNECT_S, every operation fails
// on all others. No operation has a deadline of its own: NCCL has none, and a rank may be late for good reasons.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include <netfold/nccl/interface.hpp>
#include "rank_connections.hpp"
#include "recovery.hpp"

namespace netfold::nccl {

// nullopt: netfold has no such type, or no such reduction.
std::optional<kernels::DType> dtype_of(DataType type);
std::optional<kernels::ReduceOp> reduce_of(Reduction reduction);

class CollComm {
 public:
  // The bound for one communicator. NCCL's channels have up to 64 under way.
  static constexpr int kMaxOperations = 256;

  // Null, with a line in NCCL's log: the ranks do not use the switch.
  static std::unique_ptr<CollComm> connect(Listener& listener, std::span<const Handle> handles, int rank);
  // Waits for the other ranks (Recovery::await_all).
  ~CollComm();
  CollComm(const CollComm&) = delete;
  CollComm& operator=(const CollComm&) = delete;

  class Request {
   public:
    CollComm& comm() const { return *comm_; }

   private:
    friend class CollComm;
    CollComm* comm_ = nullptr;
    std::shared_ptr<engine::Operation> operation_;  // null: the request is free
    std::size_t bytes_ = 0;
  };

  // A part of the vector of all ranks' blocks.
  struct Window {
    std::size_t bytes_per_rank = 0;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  // They borrow the memory until the request is done. Null: all requests are in use.
  // Throw std::invalid_argument for sizes that do not fit together.
  Request* all_reduce(const std::byte* data, std::byte* into, std::size_t count, kernels::DType dtype,
                      kernels::ReduceOp reduce);
  // data: this rank's block within the window. into: the window.
  Request* all_gather(const std::byte* data, std::byte* into, const Window& window);
  // data: the window. into: this rank's block within the window.
  Request* reduce_scatter(const std::byte* data, std::byte* into, const Window& window, kernels::DType dtype,
                          kernels::ReduceOp reduce);

  enum class Outcome { under_way, done, failed };
  // done: the request is free. failed: the communicator is; NCCL's log has the reason, once.
  // bytes: of the operation's result, unless null.
  Outcome test(Request& request, int* bytes);

 private:
  CollComm(std::shared_ptr<engine::Group> group, std::shared_ptr<Recovery> recovery, MemberLinks links);

  Request* free_request();
  void submit(Request& request, collective::Call call, std::size_t bytes);
  // The parts of a window, by rank.
  std::vector<collective::Buffer> blocks(std::byte* data, const Window& window) const;

  const std::shared_ptr<engine::Group> group_;
  const std::shared_ptr<Recovery> recovery_;
  MemberLinks links_;
  std::array<Request, kMaxOperations> requests_;
  bool has_reported_ = false;  // its failure
};

}  // namespace netfold::nccl
