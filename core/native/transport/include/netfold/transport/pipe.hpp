// A byte stream to one other rank, in both directions. No call blocks, and a pipe does not interpret the bytes.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace netfold::transport {

class ResumableSocket;

class Pipe {
 public:
  struct Io {
    std::size_t bytes = 0;
    bool closed = false;               // the peer closed the pipe, or the connection broke
    int error = 0;                     // errno of a broken connection; 0 for an orderly close
    const std::string* why = nullptr;  // the reason where one is known; the pipe owns the text
    bool is_ours = false;              // the fault is on this side, and the peer may be well
    bool is_orderly = false;           // the peer is known to have closed the group
    std::size_t in_gpu = 0;            // of `bytes`, those that receive_into_gpu found in memory of a GPU
  };

  // The first use of leased memory counts as a hit where a fabric had it registered, else as a miss.
  struct RegistrationUses {
    std::atomic<std::uint32_t> hits{0};
    std::atomic<std::uint32_t> misses{0};
  };
  // A promise that memory stays mapped as it is until the last reference ends. The owner of the memory makes it, or an
  // operation that borrowed the memory.
  using RegistrationLease = std::shared_ptr<RegistrationUses>;
  // Memory of a GPU, which only the fabric may touch. A fabric has it registered until the last reference ends.
  struct GpuMemory {};
  using GpuLease = std::shared_ptr<GpuMemory>;
  // Memory to receive into that a fabric has registered already. It returns to its pipe when the last reference ends.
  using Scratch = std::shared_ptr<std::byte[]>;

  virtual ~Pipe() = default;
  // Moves as many bytes as go at once. 0 bytes and not closed: try again later.
  virtual Io send(std::span<const iovec> pieces) = 0;
  // The same, for the last bytes before this end closes: they reach a peer to which `send` cannot send yet.
  virtual Io send_last(std::span<const iovec> pieces) { return send(pieces); }
  virtual Io receive(std::span<const iovec> pieces) = 0;
  // Adds descriptors that wake a sleeping thread once one of `events` (POLLIN, POLLOUT, POLLRDHUP) is there.
  virtual void wait_for(short events, std::vector<pollfd>& fds) const = 0;
  // Whether the peer has closed its end for good. Bytes that the peer sent before may still be unread.
  virtual bool hung_up() = 0;
  // Bytes sent to the peer that may be lost if this end closes while the peer still sends.
  virtual std::size_t unconfirmed() const = 0;
  // Sends on what was taken from callers before. True once all is sent, or where nothing can be done now. After false,
  // the descriptors of `wait_to_flush` wake a thread that can continue.
  virtual bool flush() { return true; }
  virtual void wait_to_flush(std::vector<pollfd>&) {}
  // Whether there is or was a connection, or the attempt to make one. A pipe without one makes it when it is used: by
  // `send`, `receive`, `hung_up`.
  virtual bool was_connected() const { return true; }
  // Whether bytes that were taken from the caller have not left this process; closing the pipe would lose them.
  virtual bool has_unsent() { return false; }

  // --- Remote memory access. Both ends agree that a part of a message, named by `name`, goes from memory to memory.
  // The receiver posts the memory (`post_receive`); the sender waits for that (`is_posted`), then writes (`put`).

  // Whether parts of this many bytes go by RMA; the same at both ends, and from the beginning.
  virtual bool uses_rma(std::size_t) const { return false; }
  // Posts memory for the part of this name; the peer owns the memory until the part is received. The part must be
  // received into exactly this memory. False: try again later. gpu: the memory is part of it; null: the host's.
  virtual bool post_receive(std::uint64_t, std::byte*, std::size_t, GpuMemory* /*gpu*/) { return false; }
  // As `receive`, where the next bytes are to be in `gpu`, posted memory of a GPU. Those that the peer wrote there are
  // received where they are. Bytes that it sent in another way go to `pieces`, so the CPU touches nothing in `gpu`.
  virtual Io receive_into_gpu(std::span<std::byte> /*gpu*/, std::span<const iovec> pieces) { return receive(pieces); }
  // Whether the peer has posted memory for the part of this name.
  virtual bool is_posted(std::uint64_t) { return false; }
  // As `send`, all or nothing. The last of `pieces` is the part of this name; leave it unchanged while
  // `bytes_in_flight` counts it. gpu: the part is in it; null: in the host's memory.
  virtual Io put(std::span<const iovec>, std::uint64_t, GpuMemory* /*gpu*/) { return {}; }
  // The longest part that can be in memory of a GPU at either end; 0: none can.
  virtual std::size_t gpu_part_bytes() const { return 0; }
  // How many of the bytes taken last the provider may still read.
  virtual std::size_t bytes_in_flight() { return 0; }
  // Takes back posted memory and parts in flight, as before a failure is reported. True once no peer and no provider
  // can read or write them; call until then. Where that takes too long, `force_close` achieves it.
  virtual bool cancel() { return true; }
  virtual void force_close() {}
  // Whether `cancel` cannot succeed any more.
  virtual bool must_force_close() { return false; }
  // At least this many bytes; null where all memory is equally good.
  virtual Scratch scratch(std::size_t) { return nullptr; }

  // Whether a reader need not look for bytes: the pipe's connections become readable, or the node knows the writers
  // (ShmNode::take_written).
  virtual bool shows_bytes() const { return false; }
  // The TCP connections under this pipe, if any.
  virtual int rails() const { return 0; }
  virtual ResumableSocket* rail(int) { return nullptr; }
};

}  // namespace netfold::transport
