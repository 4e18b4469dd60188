// The data of StreamMux that its parts share: streams, their messages and their buffers.
//
// Sender sends segments, Receiver receives them, RmaGrants writes to granted memory. StreamMux holds the lock.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>
#include <netfold/transport/fabric/registration_cache.hpp>
#include <netfold/transport/mapping.hpp>
#include <netfold/transport/pipe.hpp>
#include <netfold/transport/socket.hpp>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace netfold::transport::fabric {

struct Stream;

// Wakes the driver of one group when another thread has found the event that the driver sleeps for. All holders share
// one reference count (enable_shared_from_this): a second count, of the Python bindings, would take the GIL when it
// drops to 0 under the mux's lock.
struct Doorbell : std::enable_shared_from_this<Doorbell> {
  void ring();
  // The driver is awake, and will look at each stream again before it sleeps.
  void note_awake();
  Fd event = make_event();
  // Under the mux's lock:
  bool asleep = false;
  bool is_rung = false;
  std::int64_t close_ns = -1;  // the deadline for closing the group's streams; -1: none was closed yet
};

// The streams of one mesh from which there may be something to read. Under the mux's lock.
struct ReadableStreams {
  std::vector<Stream*> streams;
};

// --- Messages --------------------------------------------------------------------------------------------------------

enum class MessageType : std::uint16_t {
  segment = 1,    // bytes of the stream
  credit = 2,     // no bytes; the header alone
  probe = 3,      // a credit that requests a credit in return
  written = 4,    // a segment whose last bytes are a WrittenTrailer: more of its bytes lie in granted memory
  grant = 5,      // one GrantEntry or several
  cancel = 6,     // revokes all grants of this stream
  cancelled = 7,  // the reply to `cancel`: no write will begin any more; `sequence` is the number of writes ever begun
};

constexpr std::uint16_t kMagic = 0x6e66;

// At the start of every message. Little-endian, as all values in messages.
struct MessageHeader {
  std::uint32_t sequence = 0;  // of a segment, its number; of a credit or probe, the first segment that has not come
  std::uint32_t read = 0;      // segments of the other direction whose bytes were all read
  std::uint32_t bytes = 0;     // behind this header
  MessageType type = MessageType::segment;
  std::uint16_t magic = kMagic;
};

struct GrantEntry {
  std::uint64_t name = 0;  // of the part of a message
  Endpoint::RemoteBuffer buffer;
  std::uint32_t bytes = 0;
  std::uint32_t number = 0;  // the immediate data of the write
};

struct WrittenTrailer {
  std::uint32_t number = 0;  // of the grant
  std::uint32_t bytes = 0;   // written there
};

// --- Buffers and operations ------------------------------------------------------------------------------------------

// An operation of the provider; a completion refers to it.
struct Operation : Work {
  enum class Kind : std::uint8_t { send, receive, write, read };
  explicit Operation(Kind of) : kind(of) {}
  Kind kind;
};

struct Slab;
struct Grant;

// A registered buffer to send from: one for each segment of the window, one for control messages, one for grants.
struct SendBuffer : Operation {
  SendBuffer() : Operation(Kind::send) {}
  enum class State : std::uint8_t { free, waiting, under_way };  // waiting: the endpoint refused it for now
  Stream* stream = nullptr;
  Slab* slab = nullptr;
  std::byte* data = nullptr;
  std::uint32_t bytes = 0;  // header included
  std::size_t rail = 0;
  State state = State::free;
  std::int64_t sent_ns = 0;  // only with several rails
};

// A registered buffer that is posted on its rail, or that holds a segment of a stream.
struct ReceiveBuffer : Operation {
  ReceiveBuffer() : Operation(Kind::receive) {}
  Slab* slab = nullptr;
  std::byte* data = nullptr;
  std::size_t rail = 0;
  std::uint32_t bytes = 0;  // behind the header
  Grant* grant = nullptr;   // of a `written` segment: the memory with the rest of its bytes
};

// A write from a caller's memory into the peer's.
struct RmaWrite : Operation {
  RmaWrite() : Operation(Kind::write) {}
  Stream* stream = nullptr;
  RegistrationCache::Entry* entry = nullptr;
  std::uint64_t first = 0;  // bytes_taken before this write and the bytes sent with it
  bool is_complete = false;
};

// A read of one byte of memory of a GPU (StreamMux::flush).
struct GpuFlush : Operation {
  GpuFlush() : Operation(Kind::read) {}
  RegistrationCache::Entry* entry = nullptr;  // null: the read is over
  Endpoint::RemoteBuffer of;
  std::int64_t polled_ns = 0;  // time of the last poll
  std::int64_t waited_ns = 0;
  bool is_begun = false;
  std::string failure;
};

// A caller's memory that the peer may write to once.
struct Grant {
  enum class State : std::uint8_t { open, landed, revoked };
  Stream* stream = nullptr;
  std::byte* into = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t number = 0;
  RegistrationCache::Entry* entry = nullptr;
  bool is_gpu = false;    // `into` is memory of a GPU
  bool is_named = false;  // by a `written` segment
  State state = State::open;
};

// The buffers that one stream brings along. They stay with the mux when the stream ends: any stream may use the receive
// buffers, and the next stream takes over the slab.
struct Slab {
  Mapping memory;
  std::vector<std::unique_ptr<Registration>> registrations;  // by rail; empty where the provider needs none
  std::vector<SendBuffer> send_buffers;                      // the window's, then one for control, one for grants
  std::vector<ReceiveBuffer> receive_buffers;
  std::uint32_t window = 0;

  void* descriptor(std::size_t rail) const {
    return registrations.empty() ? nullptr : registrations[rail]->descriptor();
  }
};

// --- Streams ---------------------------------------------------------------------------------------------------------

struct Stream {
  std::shared_ptr<Doorbell> doorbell;
  Slab* slab = nullptr;
  std::string failure;      // why nothing is sent any more; empty while the stream works
  bool is_pending = false;  // listed in MuxState::pending
  bool is_leaving = false;  // closed, but not all its sends are complete
  int peer = -1;            // the rank at the other end
  // The list that this stream enters when a segment can be read or the stream has failed. The stream enters again only
  // after it was taken from the list. Null: the stream enters no list.
  std::shared_ptr<ReadableStreams> readable;
  bool is_listed = false;

  // Sender.
  std::vector<Endpoint::Peer> peers;  // by rail; empty until connect()
  std::vector<bool> rail_failed;      // by rail
  std::size_t last_rail = 0;
  std::uint64_t send_tag = 0;
  std::uint32_t send_window = 0;    // the smaller of both ends' windows, so the same at both
  std::uint32_t sent = 0;           // segments ever numbered
  std::uint32_t confirmed = 0;      // of these, read by the peer
  std::uint32_t arrived = 0;        // all segments before this number are at the peer, as far as it has reported
  std::int64_t probed_ns = 0;       // time of the last probe
  std::deque<SendBuffer*> waiting;  // segments in state `waiting`, in order
  std::size_t under_way = 0;        // sends that are not complete
  std::uint64_t bytes_taken = 0;    // from the caller, in segments and in writes
  bool owes_hello = false;

  // Receiver.
  std::uint64_t receive_tag = 0;
  std::vector<ReceiveBuffer*> received;  // segments that are here, by number modulo the window
  std::uint32_t read = 0;                // segments whose bytes were all read
  std::uint32_t offset = 0;              // bytes of the next segment that were read
  std::uint32_t reported_read = 0;       // the value of `read` that the peer was last sent
  bool owes_probe_reply = false;
  bool is_heard = false;  // a message has come

  // RmaGrants: writes to the peer's memory.
  std::map<std::uint64_t, GrantEntry> offers;  // the peer's grants that are not used yet, by name
  bool awaits_offer = false;                   // the caller's last part found no offer
  bool write_refused = false;                  // the endpoint refused the caller's last write for now
  std::deque<RmaWrite> writes;                 // in order, from the oldest that is not complete
  std::size_t reported_in_flight = 0;          // the last result of bytes_in_flight
  std::uint32_t writes_begun = 0;              // ever
  bool peer_cancelled = false;                 // no write may begin any more
  bool owes_cancelled = false;

  // RmaGrants: the peer's writes to this rank's memory.
  std::vector<GrantEntry> unsent_grants;
  std::size_t grants = 0;       // whose bytes were not read yet
  std::size_t open_grants = 0;  // of these, in state `open`
  std::uint32_t landed = 0;     // writes of the peer that have landed, ever
  bool is_cancelling = false;
  bool owes_cancel = false;
  std::optional<std::uint32_t> peer_writes;  // writes that the peer ever began; known once it began the last

  std::uint32_t window() const { return slab->window; }
  SendBuffer& segment_buffer(std::uint32_t number) { return slab->send_buffers[number % window()]; }
  SendBuffer& control_buffer() { return slab->send_buffers[window()]; }
  SendBuffer& grant_buffer() { return slab->send_buffers[window() + 1]; }

  bool may_send() {
    return failure.empty() && sent - confirmed < send_window && segment_buffer(sent).state == SendBuffer::State::free;
  }
  bool is_settled() const { return under_way == 0 && !is_pending; }
  std::size_t rails_left() const {
    return static_cast<std::size_t>(std::count(rail_failed.begin(), rail_failed.end(), false));
  }
  // The working rails in turn. Precondition: rails_left() > 0.
  std::size_t take_rail() {
    do {
      last_rail = (last_rail + 1) % peers.size();
    } while (rail_failed[last_rail]);
    return last_rail;
  }

  // The next segment to read, where the segment and its granted memory are here as a whole; else null.
  ReceiveBuffer* next_segment() const {
    ReceiveBuffer* next = received[read % window()];
    return next == nullptr || next->grant == nullptr || next->grant->state == Grant::State::landed ? next : nullptr;
  }
  void list_readable() {
    if (readable == nullptr || std::exchange(is_listed, true)) return;
    readable->streams.push_back(this);
  }
  std::uint32_t first_missing() const {
    std::uint32_t number = read;
    while (number - read < window() && received[number % window()] != nullptr) ++number;
    return number;
  }
  // The control message that is due to the peer, if any.
  std::optional<MessageType> due_control() const {
    if (owes_cancel) return MessageType::cancel;
    if (owes_cancelled) return MessageType::cancelled;
    if (owes_hello) return MessageType::probe;
    // Half of what the peer may send unread: its buffers may be fewer than this end's.
    if (owes_probe_reply || read - reported_read >= std::max(1u, send_window / 2)) return MessageType::credit;
    return std::nullopt;
  }

  // Bytes from the first that the provider may still read to the last that was taken.
  std::size_t bytes_in_flight() const { return writes.empty() ? 0 : bytes_taken - writes.front().first; }
};

struct MuxCounters {
  std::uint64_t segments_sent = 0;
  std::uint64_t segments_received = 0;
  std::uint64_t credits_sent = 0;
  std::uint64_t refused = 0;  // calls that an endpoint refused for now
  std::uint64_t out_of_order = 0;
  std::uint64_t repeated = 0;    // segments that came twice
  std::uint64_t rails_lost = 0;  // counted for each stream
  std::uint64_t rejected = 0;    // malformed messages, and those with an unknown tag or grant
  std::uint64_t writes = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t grants = 0;
  std::uint64_t grants_cancelled = 0;  // before anything was written
  std::uint64_t streams = 0;           // that are open now
  std::uint64_t receive_bytes = 0;     // of the posted buffers, those of streams that ended included
  std::uint64_t addresses = 0;         // of peers, for each rail
  RegistrationCache::Counters registrations;
};

// The state that Sender, Receiver and RmaGrants share.
struct MuxState {
  // Throws Error where a provider's tags or messages are too short.
  explicit MuxState(std::vector<std::unique_ptr<Endpoint>> endpoints);

  std::vector<std::unique_ptr<Endpoint>> rails;                        // empty once the endpoint was closed
  const std::vector<Endpoint::Limits> limits;                          // by rail
  std::size_t segment_bytes = 0;                                       // of the longest segment, header included
  std::unordered_map<std::uint64_t, std::unique_ptr<Stream>> streams;  // by receive_tag
  std::vector<Stream*> pending;                                        // with a message that was refused for now
  MuxCounters counters;

  std::string provider() const { return "provider " + limits.front().provider; }
  bool has_several_rails() const { return limits.size() > 1; }
  // Lets `progress` try the stream's refused messages again.
  void retry_later(Stream& stream);
  // Ends all sending of the stream and wakes its driver.
  void fail(Stream& stream, const std::string& reason);
  void fail_all(const std::string& reason) {
    for (auto& [tag, stream] : streams) fail(*stream, reason);
  }
};

}  // namespace netfold::transport::fabric
