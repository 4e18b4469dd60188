// The interface of one reliable-datagram endpoint, with its completion queue and address vector: the few functions of
// libfabric that StreamMux and FabricDatagrams need.
//
// `libfabric.hpp` opens an endpoint on a provider. `strict_endpoint.hpp` wraps any endpoint, to check its users against
// the rules of the strictest provider. An endpoint is not thread-safe; its owner holds a lock.
//
// The rules are EFA's, the provider that promises least. Messages and completions come in any order. Memory is
// registered before it is sent from or received into, where `needs_registration`. A `Work` belongs to the provider from
// the call to its completion (FI_CONTEXT2). Data move only in `poll` (manual progress). Every call may return `later`.
// A write's bytes are there once the number of the write has arrived; no other order holds between writes and messages.
// A provider with `orders_writes` keeps messages behind earlier writes instead, and delivers no number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace netfold::transport::fabric {

// The longest message that StreamMux sends, where the provider takes it: 64 KB behind a header of 16 bytes. Half of
// that costs a fifth more of a core's time over tcp;ofi_rxm (an all_reduce of 16 MB, 2 ranks: 8.7 ms against 6.7 to 7.0
// ms).
constexpr std::size_t kMaxSegmentBytes = (64 << 10) + 16;
// A tag of so many bits cannot be guessed.
constexpr int kLeastTagBits = 48;

// One operation in progress. The caller derives its own state from it. The provider uses the reserved memory.
struct Work {
  void* reserved[8] = {};  // struct fi_context2
};

struct Completion {
  enum class Kind : std::uint8_t {
    sent,      // a message, a write or a read of this rank
    received,  // a message
    landed,    // a write of a peer
    failed
  };
  Kind kind = Kind::sent;
  Work* work = nullptr;  // null: of `landed`, or of a failure of the endpoint itself
  std::size_t bytes = 0;
  std::uint64_t tag = 0;  // of `landed`, the number of the write
  std::string why;        // of a failure, the provider's reason
};

// Memory that is registered with the provider, until this object ends.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void* descriptor() const = 0;
  // The address for the peer to write to `data` within the memory: RemoteBuffer's fields.
  virtual std::uint64_t key() const = 0;
  virtual std::uint64_t address(const std::byte* data) const = 0;
};

// The memory that is registered: this process's, or a GPU's, which the CPU must neither read nor write.
struct Memory {
  static constexpr int kHost = -1;
  int gpu = kHost;  // CUdevice
  // A dmabuf of the GPU's memory, of the caller until the registration is made; -1: none. Only where Limits::takes_dmabuf.
  int dmabuf = -1;
  std::uint64_t offset = 0;  // of the memory in the dmabuf
  bool is_gpu() const { return gpu != kHost; }
};

// The use of registered memory.
enum class Access : std::uint8_t {
  messages,
  writes  // this rank writes from the memory, and peers write into it; this rank reads a GPU's memory (read)
};

// A fabric's error: one sentence with the provider's own reason.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Endpoint {
 public:
  using Peer = std::uint64_t;  // fi_addr_t

  struct Limits {
    std::string provider;  // libfabric's name
    std::string version;
    std::string domain;
    std::size_t message_bytes = 0;
    std::size_t inject_bytes = 0;
    // Of the longest write. 0: the provider can neither write with a number of 32 bits nor order writes.
    std::size_t write_bytes = 0;
    // Peers write without this process (shm: the kernel copies on the peer's order). A peer can use memory that it was
    // granted whatever this process closes.
    bool peers_write = false;
    bool orders_writes = false;  // a message arrives after earlier writes; writes carry no numbers
    std::size_t sends = 0;       // in progress at once
    std::size_t receives = 0;    // posted at once
    int tag_bits = 64;           // the lowest bits of a tag that reach the peer
    bool needs_registration = false;
    // Why memory of GPUs cannot be registered; empty where it can be, and the provider moves it without the CPU.
    std::string no_gpus = "it was not asked for memory of GPUs";
    bool takes_dmabuf = false;
  };

  enum class Taken : std::uint8_t {
    yes,
    later,
    never  // see why()
  };

  // An address in a peer's memory.
  struct RemoteBuffer {
    std::uint64_t address = 0;
    std::uint64_t key = 0;
  };

  virtual ~Endpoint() = default;
  // Ends the endpoint and all operations in progress. After it, only registrations may end.
  virtual void close() {}
  virtual const Limits& limits() const = 0;
  // The name by which peers reach this endpoint.
  virtual std::vector<std::byte> name() const = 0;
  // Adds the peer of this name. Throws Error for a malformed name.
  virtual Peer add(std::span<const std::byte> name) = 0;
  // memory: of a GPU only where Limits::no_gpus is empty.
  // Throws Error, which names the limit on locked memory where that may be the reason.
  virtual std::unique_ptr<Registration> register_memory(std::byte* data, std::size_t bytes, Access access,
                                                        const Memory& memory) = 0;

  virtual Taken send(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, std::uint64_t tag,
                     Work* work) = 0;
  // Sends up to inject_bytes. The caller may reuse the memory at once; there is no completion.
  virtual Taken inject(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag) = 0;
  // Writes into memory that the peer registered for writes. Only where write_bytes > 0.
  virtual Taken write(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, const RemoteBuffer& into,
                      std::uint32_t number, Work* work) = 0;
  // Reads from memory of a GPU that `from`, this endpoint itself, registered for writes. Only where Limits::no_gpus is
  // empty.
  virtual Taken read(Peer from, std::byte* into, std::size_t bytes, void* descriptor, const RemoteBuffer& of,
                     Work* work) = 0;
  // Posts memory for one message with any tag.
  virtual Taken receive(std::byte* into, std::size_t bytes, void* descriptor, Work* work) = 0;
  // The reason of the last `never`.
  virtual const std::string& why() const = 0;

  // Makes progress; returns how many entries of `into` were filled.
  virtual std::size_t poll(std::span<Completion> into) = 0;
  // Whether the next event would wake a thread that sleeps on wait_fd(). False: poll once more.
  virtual bool may_sleep() = 0;
  // Readable when poll should be called; -1 where the provider has no descriptor and must be polled by a timer.
  virtual int wait_fd() const = 0;
};

}  // namespace netfold::transport::fabric
