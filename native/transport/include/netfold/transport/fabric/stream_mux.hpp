// This process's place on a fabric, and the streams of bytes that go over it to other ranks.
//
// DATA PATH. A port has one wire (endpoint.hpp) for each rail, shared by all groups of the process. A stream is one
// direction pair between two ranks: what is sent is cut into *segments*, each copied behind a header into a registered
// buffer, numbered, and sent as one tagged message over whichever rail is next. The receiver has buffers posted for
// anything that comes; it sorts segments by stream (the tag) and by number, and hands out their bytes in order. A
// buffer whose bytes were all read is posted again.
//
//     bytes -> [header|bytes] #7 --rail 0--> buffers of the port -> by tag, by number -> bytes in order
//              [header|bytes] #8 --rail 1-->
//
// The caller gets its memory back at once, as from a socket: what is under way is never a tensor's. A message is one
// segment or many; nothing here depends on where one ends.
//
// THE DIRECT PATH. Segments cost a copy at either end. A large piece that both callers know to be one goes without: who
// receives *expects* it into its own memory, under a name that both have for the piece, and that memory is *granted* to
// the peer: registered, and told with its address, its key and a random number of 32 bits. Who sends *lends* the piece:
// once there is a grant of that name it is written there, from the caller's own memory, with the number as immediate
// data, and the stream gets a numbered segment with the small bytes before the piece and the word "so many bytes lie
// at grant so-and-so". That segment is there once both have come, in either order, so no order is assumed, and bytes
// are handed out as ever. What is expected is always written, never sent in segments as well: who lends waits for the
// grant. That costs no more than the window does, since a grant is given ahead, by who will read the piece in any case.
//
//     receiver: expect(name) --grant: name, address, key, number-->            sender: lend(name)
//               memory       <--write with the number------------------------- memory
//               in order     <--#9: bytes before it | number, length---------- (returned once the write is complete)
//
// WITHDRAWING. Memory that is lent or granted must be its owner's again before the owner hears that an operation
// failed: a provider that wrote to it later would write into other values. So a group that fails *withdraws* first:
// writes under way are waited for; grants are revoked, the peer answers how many writes it ever began, and with the
// last of these landed nothing can come any more. Its last word (fabric_pipe.hpp) says the same. Where there is no such
// answer in time, or the peer died without one, no promise of the provider is left that holds, and *the endpoint is
// closed*: nothing can be read or written then. All streams of this port fail with that reason, other groups' too; the
// next group opens a new port.
//
// Registrations are the cache's (registration_cache.hpp). Nothing goes the direct path over several rails (a write that
// was lost with its rail could still land), nor on a wire that cannot write, nor on one whose peers write by themselves
// (shm: who was stopped and goes on would write, whatever is closed here); then there are segments.
//
// RULES. Written to what EFA promises: messages come in any order, and so do completions (sequence numbers, a slot for
// each number in the window); memory is registered before the provider sees it; a Work is the provider's until it
// completes; sizes are what the wire says; any call may be refused for now, and is then made again by the next
// `progress`. Nothing moves but in `progress`, which everyone calls who waits for something: it takes all completions,
// also those of other groups, and rings the bell of who sleeps over them.
//
// BOUNDS. A stream has a *window* of segments, told to the peer when they meet: so many may be sent and not yet read.
// The receiver's share of posted buffers is as large, so the provider never holds what nobody has room for. How many
// were read goes back in every segment's header, and alone (a *credit*) once half a window was read and nothing was
// said. All buffers together keep to kBudgetBytes: streams that are opened together share half of what is left of it,
// so that many get smaller windows, and where not one segment each fits any more they are refused.
//
// WHO MAY SPEAK. Names of endpoints and tags are told over the connections of the handshake, which are authenticated. A
// tag is drawn at random for each stream and direction by who receives: it is the stream's nonce, and every segment
// carries it. A message with a tag that was never given out, or that is malformed, is counted and dropped; it changes
// nothing. As with TCP after its handshake, who can read the wire can forge what travels on it.
//
//   open --connect()--> up --a send fails--> failed     on several rails: that rail is out for this stream, and what
//                        |                              was not confirmed goes again over the others
//                        +--close()--> leaving --last completion--> gone
//
// RAILS. Segments are the stripes: each goes over the next rail that works, a small message whole, and the numbers put
// together what comes. A rail that dies without an error shows by what does not come: while the peer confirms nothing
// it is asked what it has, and what is missing though it was sent long before has lost its rail for this stream; all
// that rail had goes again over the others. So over several rails a stream is settled once the peer has everything.
//
// WHAT GOES WRONG. A completion error fails the streams it concerns, with the provider's words. A peer that vanishes
// need not be noticed by a provider: fabric_pipe.hpp keeps the handshake's connection beside each stream, and its end
// is the peer's. A segment that comes twice, as one that went again may, is dropped by its number.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>
#include <netfold/transport/fabric/registration_cache.hpp>
#include <netfold/transport/pipe.hpp>
#include <netfold/transport/socket.hpp>

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

namespace netfold::transport::fabric {

// Wakes the driver of one group, when another thread found what it sleeps over. Whoever shares it shares this one
// count: another, with the bindings' own end, would want Python's lock from under the port's.
struct Doorbell : std::enable_shared_from_this<Doorbell> {
  Doorbell();
  Fd event;
  // Under the port's lock.
  bool asleep = false;
  bool is_rung = false;
  std::int64_t close_ns = -1;  // when the streams that are being closed are to be through
};

class StreamMux : public std::enable_shared_from_this<StreamMux> {
 public:
  static constexpr std::size_t kBudgetBytes = 256 << 20;
  static constexpr std::uint32_t kMaxWindow = 16;
  static constexpr std::int64_t kFlushNs = 100'000'000;
  // Between two looks of a sleeper at a provider that cannot wake it.
  static constexpr std::int64_t kPollIntervalNs = 200'000;
  // Granted at once in a stream, and not yet read.
  static constexpr std::size_t kMaxGrants = 16;
  // Before a piece that is lent, in its segment.
  static constexpr std::size_t kMaxBeforeBytes = 64;
  // Scratch that is kept while nobody uses it.
  static constexpr std::size_t kScratchBytes = 32 << 20;
  // From here on a piece goes the direct path, where nothing else was said.
  static constexpr std::size_t kRmaMinBytes = 64 << 10;

  struct Stream;

  // What the other end must know of a stream of ours.
  struct StreamParams {
    std::uint64_t tag = 0;
    std::uint32_t window = 0;         // segments that we have room for
    std::uint32_t segment_bytes = 0;  // of the longest
    std::uint64_t rma_min_bytes = 0;  // of the shortest piece that may be written; 0: none
  };
  // How many segments were sent, and how many writes begun.
  struct FinalCounts {
    std::uint32_t segments = 0;
    std::uint32_t writes = 0;
  };
  // Of streams that are opened from then on, and of the registration cache.
  struct Settings {
    std::size_t rma_min_bytes = kRmaMinBytes;  // 0: never
    RegistrationCache::Limits registrations;
  };

  // Of one process; all wires are of one provider.
  explicit StreamMux(std::vector<std::unique_ptr<Endpoint>> rails);
  ~StreamMux();
  StreamMux(const StreamMux&) = delete;
  StreamMux& operator=(const StreamMux&) = delete;

  const Endpoint::Limits& limits() const { return limits_.front(); }
  const Endpoint::Limits& limits(std::size_t rail) const { return limits_[rail]; }
  // False once its endpoint had to be closed: no stream of it works then, nor can one be opened.
  bool is_open() const;
  void set(const Settings& settings);
  std::size_t rails() const { return peers_.size(); }
  // Why nothing will go the direct path; empty where large pieces will.
  std::string why_not_rma() const;
  // Of the endpoints, by rail.
  std::vector<std::vector<std::byte>> names() const;

  // A stream that is one of `streams` opened together: they share what is left of the budget. Throws Error.
  Stream* open(std::shared_ptr<Doorbell> doorbell, std::size_t streams);
  StreamParams params(const Stream* stream) const;
  // `names`: of the peer's endpoints, by rail. Throws Error.
  void connect(Stream* stream, const std::vector<std::vector<std::byte>>& names, const StreamParams& theirs);
  // Tries to see the last of what was sent off, and to take back what was lent, for kFlushNs from the first stream of
  // its group on.
  FinalCounts close(Stream* stream);

  // As many bytes as go now, or are here.
  std::size_t send(Stream* stream, std::span<const iovec> pieces);
  std::size_t receive(Stream* stream, std::span<const iovec> pieces);

  // The direct path: whether a piece of so many bytes goes by it; the same at both ends.
  bool uses_rma(const Stream* stream, std::size_t bytes) const;
  // Grants memory for the piece that the peer will lend under this name; the next `receive` tells it. False: later.
  bool post_receive(Stream* stream, std::uint64_t name, std::byte* into, std::size_t bytes);
  // Whether the peer expects that piece by now.
  bool is_offered(Stream* stream, std::uint64_t name);
  // All of `pieces` or nothing, for now. The last is the piece of that name: it is lent until `lent` says otherwise.
  // What is before it, up to kMaxBeforeBytes, is copied.
  std::size_t put(Stream* stream, std::span<const iovec> pieces, std::uint64_t name);
  // Of the bytes that were taken, counted back from the last: those of the oldest piece that is not through, and after.
  std::size_t bytes_in_flight(Stream* stream);
  // Takes back what is lent and granted: true once it is. To be called again until then, or to `force_close`.
  bool cancel(Stream* stream);
  // That the peer will begin no write any more, and began so many.
  void confirm_cancel(Stream* stream, std::uint32_t writes);
  FinalCounts final_counts(const Stream* stream) const;
  // Closes the endpoint: every stream fails with this reason, and no memory is the provider's any more.
  void force_close(const std::string& why);
  // Says that this memory stays mapped as it is until the hold ends.
  std::unique_ptr<Pipe::RegistrationLease> lease(std::byte* data, std::size_t bytes,
                                                 RegistrationCache::Lifetime lifetime);

  // Registered as long as the port keeps it, for the next who asks, within kScratchBytes.
  std::unique_ptr<Pipe::Scratch> scratch(std::size_t bytes);

  // Why nothing will be sent any more; empty while it works.
  std::string failure(const Stream* stream) const;
  // Segments whose bytes were all read.
  std::uint32_t read(const Stream* stream) const;
  // Whether the provider has everything that was taken from callers, and needs us no more for it.
  bool settled(Stream* stream);
  std::size_t unconfirmed(const Stream* stream) const;
  // What wakes a sleeper: `events` of this stream, or something to do for its sake.
  void wait_for(Stream* stream, short events, std::vector<pollfd>& fds);
  // Does what the provider has to do, for all streams.
  void make_progress();
  // What wakes a sleeper soon, in any case.
  void wake_after(std::vector<pollfd>& fds, std::int64_t delay_ns);

  struct Counters {
    std::uint64_t segments_sent = 0;
    std::uint64_t segments_received = 0;
    std::uint64_t credits_sent = 0;
    std::uint64_t refused = 0;  // for now; made again
    std::uint64_t out_of_order = 0;
    std::uint64_t repeated = 0;    // came twice
    std::uint64_t rails_lost = 0;  // counted for each stream
    std::uint64_t rejected = 0;    // with a tag that nobody has (any more), or malformed
    std::uint64_t writes = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t grants = 0;
    std::uint64_t grants_cancelled = 0;  // before anything was written
    RegistrationCache::Counters registrations;
  };
  Counters counters() const;

 private:
  enum class MessageType : std::uint16_t;
  class MuxLease;
  class MuxScratch;
  struct Block;
  struct GrantEntry;
  struct WrittenTrailer;
  struct Header;
  struct Job;
  struct Writing;
  struct Grant;
  struct Sending;
  struct Receiving;
  struct Slab;

  // Rounds of completions taken by one call, so that who calls gets on.
  static constexpr int kRounds = 4;
  // Failed receives in a row after which the endpoint is not believed any more.
  static constexpr int kMaxFailedReceives = 64;
  // Between two questions to a peer that has not confirmed what was sent, over several rails.
  static constexpr std::int64_t kAskNs = 50'000'000;
  // A segment that has not come after this time, while others do, is lost, and its rail with it.
  static constexpr std::int64_t kLostNs = 1'000'000'000;
  // A look that found nothing, system calls and all, is not repeated within this time by who has others to wait for.
  static constexpr std::int64_t kMinProgressIntervalNs = 1'000;
  // Told in one message.
  static constexpr std::size_t kGrantsAMessage = 8;

  Slab* take_slab(std::uint32_t window);
  void post(Receiving& receiving);
  Endpoint::Taken hand_over(Sending& sending);
  void send_credit(Stream& stream);
  Endpoint::Taken send_control(Stream& stream, MessageType type);
  void look_for_losses();
  void handle_probe_reply(Stream& stream, std::uint32_t first_missing);
  bool progress();
  void progress_if_due();
  void push(Stream& stream);
  void push_later(Stream& stream);
  std::string obstacle() const;
  static bool is_sound(MessageType type, std::size_t bytes);
  void send_segment(Stream& stream, Sending& sending, std::size_t bytes, MessageType type);
  std::size_t grant_message_bytes() const;
  void send_grants(Stream& stream);
  void granted(Stream& stream, const std::byte* words, std::size_t bytes);
  bool place_written(Stream& stream, Receiving& receiving);
  void written(Writing& writing);
  void landed(std::uint32_t number);
  bool is_cancel_complete(Stream& stream);
  void close_endpoint(const std::string& why);
  std::uint32_t random_number();
  void sent(Sending& sending);
  void received(Receiving& receiving, std::size_t bytes, std::uint64_t tag);
  void failed(const Completion& completion, std::size_t rail);
  void fail(Stream& stream, const std::string& why);
  void drop_rail(Stream& stream, std::size_t rail, const std::string& why);
  void repeat(Stream& stream, std::size_t rail);
  void ring_doorbell(Stream& stream);
  void forget(Stream& stream);
  bool is_settled(const Stream& stream) const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Endpoint>> rails_;  // none once it was closed
  const std::vector<Endpoint::Limits> limits_;    // by rail
  Settings settings_;
  RegistrationCache cache_;
  std::unordered_map<std::uint32_t, Grant> grants_;           // by number, of all streams
  std::vector<std::unique_ptr<Block>> blocks_;                // scratch that nobody uses, the last used last
  std::vector<std::uint32_t> random_;                         // numbers in store
  std::vector<std::map<std::string, Endpoint::Peer>> peers_;  // by rail and name
  std::size_t segment_bytes_ = 0;
  std::size_t used_bytes_ = 0;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<Slab*> spare_;                                            // of streams that are gone
  std::unordered_map<std::uint64_t, std::unique_ptr<Stream>> streams_;  // by our tag
  std::vector<std::unique_ptr<Stream>> leaving_;
  std::vector<Receiving*> unposted_;
  std::vector<Stream*> pending_;  // have something that was refused for now
  std::array<Completion, 32> batch_;
  int failed_receives_ = 0;
  std::int64_t looked_ns_ = 0;  // the last time that there was nothing
  Counters counters_;
  Fd ready_;  // always readable
  Fd wake_timer_;
  int pid_;
};

}  // namespace netfold::transport::fabric
