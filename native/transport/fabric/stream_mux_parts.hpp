// What a port is made of: the port's own, for its two files. stream_mux.cpp carries segments, rma.cpp writes.
#pragma once

#include <sys/mman.h>
#include <netfold/transport/fabric/stream_mux.hpp>

#include <algorithm>
#include <chrono>
#include <optional>

namespace netfold::transport::fabric {

constexpr std::uint16_t kMagic = 0x6e66;

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

enum class StreamMux::MessageType : std::uint16_t {
  segment = 1,
  credit = 2,
  probe = 3,    // a credit that wants one back
  written = 4,  // a segment, and after it bytes that lie where they were granted to
  grant = 5,
  cancel = 6,     // what was granted counts no more
  cancelled = 7,  // the answer: no more of it will be written to; `sequence` is how many writes there were
};

// In front of every segment; all of a credit. Little-endian, as values on the wire are.
struct StreamMux::Header {
  std::uint32_t sequence = 0;  // of this segment; in a credit, of the first that has not come from the other end
  std::uint32_t read = 0;      // segments from the other end whose bytes were all read
  std::uint32_t bytes = 0;     // behind this header
  MessageType type = MessageType::segment;
  std::uint16_t magic = kMagic;
};

// Behind the header of a grant, one or several.
struct StreamMux::GrantEntry {
  std::uint64_t name = 0;  // of the piece
  Endpoint::RemoteBuffer place;
  std::uint32_t bytes = 0;
  std::uint32_t number = 0;  // that comes with the write
};

// The last bytes of a segment that is `written`.
struct StreamMux::WrittenTrailer {
  std::uint32_t number = 0;
  std::uint32_t bytes = 0;
};

// What a completion is of.
struct StreamMux::Job : Work {
  enum class Kind : std::uint8_t { send, receive, write };
  explicit Job(Kind type) : kind(type) {}
  Kind kind;
};

// A buffer to send from: one a segment in the window, one for credits, one for grants.
struct StreamMux::Sending : Job {
  Sending() : Job(Kind::send) {}
  enum class State : std::uint8_t { free, waiting, under_way };  // waiting: refused for now
  Stream* stream = nullptr;
  Slab* slab = nullptr;
  std::byte* data = nullptr;
  std::uint32_t bytes = 0;  // header included
  std::size_t rail = 0;
  State state = State::free;
  std::int64_t sent_ns = 0;  // where there are several rails
};

// A buffer that is posted on its rail, or that a stream reads from.
struct StreamMux::Receiving : Job {
  Receiving() : Job(Kind::receive) {}
  Slab* slab = nullptr;
  std::byte* data = nullptr;
  std::size_t rail = 0;
  std::uint32_t bytes = 0;  // behind the header
  Grant* grant = nullptr;   // where more bytes lie
};

// A caller's memory that the provider reads from.
struct StreamMux::Writing : Job {
  Writing() : Job(Kind::write) {}
  Stream* stream = nullptr;
  RegistrationCache::Entry* entry = nullptr;
  std::uint64_t first = 0;  // of the bytes that the stream took, the piece's with what was before it
  bool is_through = false;
};

// A caller's memory that the peer may write to, once.
struct StreamMux::Grant {
  enum class State : std::uint8_t { open, landed, over };  // over: taken back
  Stream* stream = nullptr;
  std::byte* into = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t number = 0;
  RegistrationCache::Entry* entry = nullptr;
  State state = State::open;
};

// Scratch: as long as it lives, the cache holds it.
struct StreamMux::Block {
  explicit Block(std::size_t length)
      : data(
            static_cast<std::byte*>(mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        bytes(length) {
    if (data == MAP_FAILED) throw Error("no memory for a fabric's scratch: " + std::to_string(length) + " bytes");
  }
  ~Block() { munmap(data, bytes); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data;
  std::size_t bytes;
  RegistrationCache::Lease* lease = nullptr;
};

// The buffers that a stream brings along. Those to receive into stay the port's when it is gone.
struct StreamMux::Slab {
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  std::vector<std::unique_ptr<Registration>> registrations;  // by rail
  std::vector<Sending> sendings;                             // the last are for credits and for grants
  std::vector<Receiving> receivings;
  std::uint32_t window = 0;

  ~Slab() {
    registrations.clear();
    if (memory != nullptr) munmap(memory, bytes);
  }
  void* descriptor(std::size_t rail) const {
    return registrations.empty() ? nullptr : registrations[rail]->descriptor();
  }
};

struct StreamMux::Stream {
  std::shared_ptr<Doorbell> doorbell;
  Slab* slab = nullptr;
  std::string why;  // not empty: failed

  // Out.
  std::vector<Endpoint::Peer> peers;  // by rail
  std::vector<bool> is_out;           // rails that failed
  std::size_t next_rail = 0;
  std::uint64_t tag_out = 0;
  std::uint32_t window_out = 0;
  std::uint32_t sent = 0;
  std::uint32_t confirmed = 0;      // of these, read by the peer
  std::uint32_t arrived_there = 0;  // and have come, as far as it has said: all before this number
  std::int64_t asked_ns = 0;
  std::deque<Sending*> waiting;  // in order
  std::size_t under_way = 0;

  // In.
  std::uint64_t tag_in = 0;
  std::vector<Receiving*> arrived;  // by number, modulo the window
  std::uint32_t read = 0;
  std::uint32_t offset = 0;  // in the segment that is being read
  std::uint32_t told = 0;    // of `read`, to the peer
  bool is_pending = false;
  bool is_leaving = false;
  bool is_asked = false;  // what has come

  // The direct path, out.
  std::size_t rma_min_bytes = 0;  // of the shortest piece that goes by it; 0: none does
  std::map<std::uint64_t, GrantEntry> offers;
  bool wants_offer = false;  // as last asked for
  bool is_refused = false;   // a write, for now
  std::deque<Writing> writings;
  std::uint64_t taken = 0;             // bytes, of all kinds
  std::size_t reported_in_flight = 0;  // as last asked for
  std::uint32_t writes = 0;            // ever begun
  bool is_cancelled = false;           // by the peer: nothing more is written
  bool owes_cancelled = false;
  // In.
  std::vector<GrantEntry> to_tell;
  std::size_t grants = 0;       // not yet read
  std::size_t open_grants = 0;  // of these, not landed
  std::uint32_t landed = 0;     // ever
  bool is_cancelling = false;
  bool owes_cancel = false;
  std::optional<std::uint32_t> cancelled_writes;  // by the peer: the writes that it ever began

  std::uint32_t window() const { return slab->window; }
  Sending& segment(std::uint32_t number) { return slab->sendings[number % window()]; }
  Sending& credit() { return slab->sendings[window()]; }
  Sending& granting() { return slab->sendings[window() + 1]; }
  // The next segment, if it is here with all that belongs to it.
  Receiving* head() const {
    Receiving* next = arrived[read % slab->window];
    return next == nullptr || next->grant == nullptr || next->grant->state == Grant::State::landed ? next : nullptr;
  }
  // Bytes from the first that the provider may still read to the last that was taken.
  std::size_t bytes_in_flight() const { return writings.empty() ? 0 : taken - writings.front().first; }
  bool may_send() {
    return why.empty() && sent - confirmed < window_out && segment(sent).state == Sending::State::free;
  }
  // Round and round those that work; not of a stream that failed.
  std::size_t take_rail() {
    do {
      next_rail = (next_rail + 1) % peers.size();
    } while (is_out[next_rail]);
    return next_rail;
  }
  bool owes_credit() const { return is_asked || read - told >= std::max(1u, slab->window / 2); }
  std::optional<MessageType> owed() const {
    if (owes_cancel) return MessageType::cancel;
    if (owes_cancelled) return MessageType::cancelled;
    if (owes_credit()) return MessageType::credit;
    return std::nullopt;
  }
  std::uint32_t first_missing() const {
    std::uint32_t number = read;
    while (number - read < slab->window && arrived[number % slab->window] != nullptr) ++number;
    return number;
  }
  std::size_t rails_left() const { return static_cast<std::size_t>(std::count(is_out.begin(), is_out.end(), false)); }
};

}  // namespace netfold::transport::fabric
