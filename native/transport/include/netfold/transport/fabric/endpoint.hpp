// What a port needs of libfabric, as a table of few functions: one reliable-datagram endpoint with its completion
// queue and address vector, and nothing of what is made of them.
//
// `libfabric.hpp` opens one on a provider; `strict_endpoint.hpp` wraps any, to hold the port to the rules of the strictest.
// A wire is not thread-safe: the port that owns it takes turns.
//
// The rules are EFA's, the provider that promises least. Messages and completions come in any order. Memory is
// registered before it is sent from or received into, where `needs_registration`. A `Work` belongs to the provider
// from the call to its completion (FI_CONTEXT2). Nothing moves but in `poll` (manual progress). Every call may say
// "later". A write's bytes are there once the number that came with it is: that, and no more, orders it among messages,
// but for a provider that promises to keep messages behind writes, where no number comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace netfold::transport::fabric {

// The longest message that a port sends, where the provider takes as much: 64 KB behind a header of 16 bytes. Half of
// it costs a fifth more of a core's time over tcp;ofi_rxm (an all_reduce of 16 MB, 2 ranks: 8.7 ms against 6.7 to 7.0).
constexpr std::size_t kMaxSegmentBytes = (64 << 10) + 16;

// One operation under way. Whoever starts it derives its own from this; the provider scribbles in it.
struct Work {
  void* reserved[8] = {};  // struct fi_context2
};

struct Completion {
  enum class Kind : std::uint8_t { sent, received, landed, failed };
  Kind kind = Kind::sent;  // sent: or written
  Work* work = nullptr;    // null: a failure of the wire itself; of what landed
  std::size_t bytes = 0;
  std::uint64_t tag = 0;  // of what landed, the number that came with it
  std::string why;        // of a failure, in the provider's words
};

// Memory that the provider knows; ends with this object.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void* descriptor() const = 0;
  // What the other end needs to write to `data`, which lies in it.
  virtual std::uint64_t key() const = 0;
  virtual std::uint64_t address(const std::byte* data) const = 0;
};

// What registered memory is for.
enum class Access : std::uint8_t { messages, writes };  // writes: from it, and by the peers into it

// An error of the fabric: one sentence with the provider's own words.
class Error : public std::exception {
 public:
  explicit Error(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

class Endpoint {
 public:
  using Peer = std::uint64_t;  // fi_addr_t

  struct Limits {
    std::string provider;  // as libfabric calls it
    std::string version;
    std::string domain;
    std::size_t message_bytes = 0;
    std::size_t inject_bytes = 0;
    std::size_t write_bytes = 0;  // of the longest write; 0: it cannot write with a number of 32 bits, nor in order
    // A peer writes by itself (shm: the kernel copies, on the peer's word): what it was told it keeps, whatever we
    // close.
    bool peers_write = false;
    bool orders_writes = false;  // a message comes after what was written before it, and there are no numbers
    std::size_t sends = 0;       // under way at once
    std::size_t receives = 0;    // posted at once
    int tag_bits = 64;           // of a tag, from the lowest on, that reach the other end
    bool needs_registration = false;
    bool is_private = false;  // only ranks of the job can send here: a tag need not be a secret
  };

  enum class Taken : std::uint8_t { yes, later, never };  // never: see why()

  // In a peer's memory.
  struct RemoteBuffer {
    std::uint64_t address = 0;
    std::uint64_t key = 0;
  };

  virtual ~Endpoint() = default;
  // Ends the endpoint, and with it all that is under way; nothing but registrations may end after it.
  virtual void close() {}
  virtual const Limits& limits() const = 0;
  // What the others need to reach this endpoint.
  virtual std::vector<std::byte> name() const = 0;
  // Throws Error for a name that is none.
  virtual Peer add(std::span<const std::byte> name) = 0;
  // Throws Error, with the limit on locked memory where that may be why.
  virtual std::unique_ptr<Registration> register_memory(std::byte* data, std::size_t bytes, Access access) = 0;

  virtual Taken send(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, std::uint64_t tag,
                     Work* work) = 0;
  // Up to inject_bytes: the memory is free at once, and no completion comes.
  virtual Taken inject(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag) = 0;
  // Into memory of `to`, which it registered for that. Only where write_bytes is not 0.
  virtual Taken write(Peer to, const std::byte* data, std::size_t bytes, void* descriptor, const RemoteBuffer& into,
                      std::uint32_t number, Work* work) = 0;
  // Takes a message with any tag.
  virtual Taken receive(std::byte* into, std::size_t bytes, void* descriptor, Work* work) = 0;
  // Why the last call was never taken.
  virtual const std::string& why() const = 0;

  // Makes progress; how many of `into` were filled.
  virtual std::size_t poll(std::span<Completion> into) = 0;
  // Whether a sleeper on wait_fd() would be woken by what comes next: false means poll once more.
  virtual bool may_sleep() = 0;
  // Readable when poll should be called; -1 where the provider has none, and must be looked at now and then.
  virtual int wait_fd() const = 0;
};

}  // namespace netfold::transport::fabric
