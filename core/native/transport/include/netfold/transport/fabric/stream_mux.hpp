// This process's endpoints on a fabric, and the byte streams that go over them to other ranks.
//
// A mux has one endpoint (endpoint.hpp) for each rail; all groups of the process share them. A stream connects two
// ranks in both directions. The sender cuts the bytes into *segments*. Each segment is copied behind a header into a
// registered buffer, numbered, and sent as one tagged message over the next rail. The receiver has posted buffers for
// any message; it sorts segments by stream (the tag) and number, and returns their bytes in order. A buffer whose bytes
// were all read is posted again.
//
//     bytes -> [header|bytes] #7 --rail 0--> posted buffers -> by tag, by number -> bytes in order
//              [header|bytes] #8 --rail 1-->
//
// The caller has its memory back at once, as with a socket: the provider never reads a tensor, except by RMA. Segment
// boundaries carry no meaning.
//
//   part        header             task
//   Sender      sender.hpp         segments, control messages, rails
//   Receiver    receiver.hpp       posted buffers, order, bytes for readers
//   RmaGrants   rma_grants.hpp     large parts of messages, written from memory to memory
//   StreamMux   this one           the lock, set-up and end of streams, completions, what wakes a sleeping thread
//
//   stream      event                            becomes      action
//   (none)      open                             open         take a slab of buffers, draw a tag
//   open        connect                          up           say hello: the peer learns that this end reaches it
//   up          a send fails on the last rail    failed       wake the driver; send nothing more
//   any         close, no send is under way      (forgotten)  give back the slab
//   any         close, sends are under way       leaving      -
//   leaving     the last send completes          (forgotten)  give back the slab
//   any         the endpoint is closed           failed       all memory is safe from the provider
//
// Rules. The code follows EFA's promises. Messages and completions come in any order: hence sequence numbers, and a
// place for each number of the window. Memory is registered before the provider sees it. A Work belongs to the provider
// until its completion. Sizes are the endpoint's. An endpoint may refuse any call for now; the next `progress` repeats
// it. Data move only in `progress`, which every waiting thread calls: it takes all completions, those of other groups
// too, and rings the doorbells of drivers that sleep for them.
//
// Bounds. A stream has a *window* of segments that may be sent and not yet read; the ranks exchange it when they
// connect. The receiver posts as many buffers, so the provider never holds messages without a buffer. A process has at
// most max_streams() streams, and all their buffers take at most kBudgetBytes. Memory for a window of one segment is
// kept back for every stream that can still come. A new stream takes up to a 32nd of the rest, so early streams get
// wide windows and later ones narrow windows. Beyond max_streams(), `open` refuses. Buffers stay posted when a stream
// ends; the next stream takes them over.
//
// Authentication. Endpoint names and tags are exchanged over the connections of the handshake, which are authenticated.
// The receiver of each stream and direction draws its tag at random: a nonce that every segment carries. A message with
// an unknown tag, or a malformed one, is counted and dropped, and changes nothing. As with TCP after its handshake, an
// attacker who can read the network can forge messages.
//
// Failures. A completion error fails the streams that it concerns, with the provider's reason. A provider may not
// notice
// that a peer is gone: fabric_pipe.hpp keeps the handshake's connection beside each stream, whose end is the peer's
// end. Closing the endpoint fails all streams of this mux, those of other groups too; the next group opens a new mux.
#pragma once

#include <netfold/transport/fabric/receiver.hpp>
#include <netfold/transport/fabric/rma_grants.hpp>
#include <netfold/transport/fabric/sender.hpp>

#include <array>
#include <list>
#include <mutex>
#include <type_traits>

namespace netfold::transport::fabric {

class StreamMux : public std::enable_shared_from_this<StreamMux> {
 public:
  static constexpr std::size_t kBudgetBytes = 256 << 20;
  static constexpr std::size_t kMaxStreams = 1024;
  static constexpr std::uint32_t kMaxWindow = 16;
  static constexpr std::int64_t kFlushNs = 100'000'000;
  // How long a flush may take, which needs some microseconds.
  static constexpr std::int64_t kReadNs = 10'000'000'000;
  // Between two polls by a sleeping thread, of a provider that cannot wake it.
  static constexpr std::int64_t kPollIntervalNs = 200'000;
  // Unused scratch memory that is kept.
  static constexpr std::size_t kScratchBytes = 32 << 20;
  // The default of Settings::rma_min_bytes.
  static constexpr std::size_t kRmaMinBytes = 64 << 10;

  // The bytes that a stream has sent in all.
  struct FinalCounts {
    std::uint32_t segments = 0;
    std::uint32_t writes = 0;
  };
  struct Settings {
    std::size_t rma_min_bytes = kRmaMinBytes;  // 0: never
    RegistrationCache::Limits registrations;
  };
  using Counters = MuxCounters;

  // rails: endpoints of one provider. One mux belongs to one process. Throws Error where a stream's buffers could not be
  // registered.
  explicit StreamMux(std::vector<std::unique_ptr<Endpoint>> rails);
  ~StreamMux();
  StreamMux(const StreamMux&) = delete;
  StreamMux& operator=(const StreamMux&) = delete;

  const Endpoint::Limits& limits() const { return limits(0); }
  const Endpoint::Limits& limits(std::size_t rail) const { return state_.limits[rail]; }
  std::size_t rails() const { return state_.limits.size(); }
  // False once the endpoint had to be closed: no stream works then, and none can be opened.
  bool is_open() const {
    return locked([&] { return !state_.rails.empty(); });
  }
  void set(const Settings& settings);
  // Why no part goes by RMA; empty where large parts do.
  std::string why_not_rma() const {
    return locked([&] { return grants_.obstacle(settings_.rma_min_bytes); });
  }
  // The shortest part that goes by RMA, as of `set`; 0: none does.
  std::size_t rma_min_bytes() const {
    return locked([&] { return grants_.obstacle(settings_.rma_min_bytes).empty() ? settings_.rma_min_bytes : 0; });
  }
  std::size_t segment_bytes() const { return state_.segment_bytes; }
  // The number of streams that a process can have at once.
  std::size_t max_streams() const { return std::min(kMaxStreams, kBudgetBytes / slab_bytes(1)); }

  // readable, peer: where the stream is listed, as the stream to that rank, when there is something to read; or null.
  // Throws Error.
  Stream* open(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<ReadableStreams> readable = nullptr, int peer = -1);
  // All that the peer must know to connect to this end: names of endpoints, tag, window and sizes.
  std::vector<std::byte> offer(const Stream* stream) const;
  // offer: the peer's. Throws Error.
  void connect(Stream* stream, std::span<const std::byte> offer);
  // Says hello to the peer, over the next rail. As `connect` did.
  void greet(Stream* stream);
  // Whether any message has come over the stream.
  bool is_heard(const Stream* stream) const {
    return locked([&] { return stream->is_heard; });
  }
  // Appends the ranks at the other ends of the listed streams, and empties the list.
  void take_readable(ReadableStreams& readable, std::vector<int>& peers);
  // Completes sends and takes back memory, until kFlushNs after the first close of a stream of this group; blocks so
  // long. Closes the endpoint where memory could not be taken back.
  FinalCounts close(Stream* stream);

  // As Pipe's functions of the same names; `send` and `receive` return the number of bytes.
  std::size_t send(Stream* stream, std::span<const iovec> pieces);
  // gpu: begins behind the bytes that were received into it when the call returns.
  std::size_t receive(Stream* stream, std::span<std::byte>& gpu, std::span<const iovec> pieces);
  bool uses_rma(std::size_t rma_min_bytes, std::size_t bytes) const { return grants_.uses_rma(rma_min_bytes, bytes); }
  bool post_receive(Stream* stream, std::uint64_t name, std::byte* into, std::size_t bytes, Pipe::GpuMemory* gpu) {
    return locked([&] { return grants_.post_receive(*stream, name, into, bytes, gpu); });
  }
  std::size_t gpu_part_bytes() const {
    return locked([&] { return grants_.gpu_part_bytes(); });
  }
  bool is_posted(Stream* stream, std::uint64_t name);
  // The pieces before the last are copied; at most RmaGrants::kMaxBeforeBytes.
  std::size_t put(Stream* stream, std::span<const iovec> pieces, std::uint64_t name, Pipe::GpuMemory* gpu);
  std::size_t bytes_in_flight(Stream* stream);
  bool cancel(Stream* stream);
  // Notes that the peer begins no more writes. writes: how many it ever began.
  void confirm_cancel(Stream* stream, std::uint32_t writes) {
    locked([&] { stream->peer_writes = writes; });
  }
  FinalCounts final_counts(const Stream* stream) const {
    return locked([&] { return FinalCounts{stream->sent, stream->writes_begun}; });
  }
  // Closes the endpoint: all streams fail with this reason, and the provider uses no memory any more.
  void force_close(const std::string& why);
  Pipe::RegistrationLease lease(std::byte* data, std::size_t bytes, RegistrationCache::Lifetime lifetime);
  // Registers memory of a GPU. Throws Error where the provider refuses, or takes none (why_no_gpus).
  Pipe::GpuLease lease_gpu(std::byte* data, std::size_t bytes, const Memory& memory);
  // Why memory of GPUs cannot be sent from and received into; empty where it can be.
  std::string why_no_gpus() const {
    return locked([&] { return grants_.gpu_obstacle(); });
  }
  // Begins to make the peers' writes into memory of a GPU visible to the GPU. A write is complete once the adapter has
  // sent it towards the GPU, and its bytes may still be on the bus. A read by the same adapter passes none of them.
  // at: an address in the memory.
  std::shared_ptr<GpuFlush> flush(Pipe::GpuMemory& memory, std::byte* at);
  // Throws Error where the read failed. Closes the endpoint where it is not complete after kReadNs: an adapter that does
  // not read is of no use to its other streams, and only then it leaves the memory alone.
  bool is_flushed(GpuFlush& flush);
  // Ends a flush whose result nobody wants: the adapter reads the memory no more when it returns. Blocks up to kReadNs.
  void end_flush(GpuFlush& flush);
  // Registered memory of at least `bytes` bytes. The mux keeps unused scratch memory, up to kScratchBytes.
  Pipe::Scratch scratch(std::size_t bytes);

  // Why no more bytes are sent; empty while the stream works.
  std::string failure(const Stream* stream) const {
    return locked([&] { return stream->failure; });
  }
  // Segments whose bytes were all read.
  std::uint32_t read(const Stream* stream) const {
    return locked([&] { return stream->read; });
  }
  // Whether the provider needs no further call for the bytes that were sent. With several rails, only once the peer has
  // them all, since they may have to be sent again.
  bool settled(Stream* stream);
  std::size_t unconfirmed(const Stream* stream) const;
  // Adds descriptors that wake a thread for `events` of this stream, or for work that the stream needs.
  void wait_for(Stream* stream, short events, std::vector<pollfd>& fds);
  // Adds descriptors that wake a thread once a stream of this driver is listed.
  void wait_for_readable(Doorbell& doorbell, const ReadableStreams& readable, std::vector<pollfd>& fds);
  // Does the provider's work for all streams.
  void make_progress() {
    locked([&] { progress(); });
  }
  // Adds a timer that wakes a thread after `delay_ns`.
  void wake_after(std::vector<pollfd>& fds, std::int64_t delay_ns);

  Counters counters() const;

 private:
  // Scratch memory; the cache has a lease of it while it lives.
  struct ScratchBlock {
    Mapping memory;
    RegistrationCache::Lease* lease = nullptr;
  };

  // Rounds of completions that one `progress` takes at most, so that its caller continues.
  static constexpr int kRounds = 4;
  // A poll that found nothing, with its system calls, is not repeated within this time by a caller with other work.
  static constexpr std::int64_t kMinProgressIntervalNs = 1'000;

  template <class Function>
  std::invoke_result_t<Function> locked(Function function) const {
    std::lock_guard lock(mutex_);
    return function();
  }
  void progress_flush(GpuFlush& flush);
  void finish_flush(GpuFlush& flush, const std::string& failure);
  ScratchBlock take_scratch(std::size_t bytes);
  void keep_scratch(ScratchBlock block);
  std::size_t slab_bytes(std::size_t window) const {
    const std::size_t segments = window * (rails() + 1);
    return segments * state_.segment_bytes + sizeof(MessageHeader) + grants_.message_bytes();
  }
  Slab* take_slab();
  Slab* make_slab(std::uint32_t window);
  static Mapping map_buffers(std::size_t bytes);
  // By rail; empty where the provider needs none.
  std::vector<std::unique_ptr<Registration>> register_buffers(const Mapping& memory);
  // Adds what wakes the driver's thread for any of its streams.
  void sleep_on(Doorbell& doorbell, std::vector<pollfd>& fds, bool must_poll, bool must_probe);
  bool progress();
  void progress_if_due();
  void handle_completion(const Completion& completion);
  void handle_failure(const Completion& completion);
  bool has_arrived(const Stream& stream) const;
  void close_endpoint(const std::string& why);
  void forget_if_left(Stream& stream);

  mutable std::mutex mutex_;
  MuxState state_;
  Settings settings_;
  RegistrationCache cache_;
  Sender sender_{state_};
  RmaGrants grants_{state_, sender_, cache_};
  Receiver receiver_{state_, sender_, grants_};
  std::list<std::shared_ptr<GpuFlush>> flushes_;  // the provider may still know them
  Mapping flush_memory_;
  std::unique_ptr<Registration> flush_registration_;  // of flush_memory_; made by the first flush
  Endpoint::Peer self_ = 0;
  std::vector<ScratchBlock> scratch_;                         // unused, the most recently used last
  std::vector<std::map<std::string, Endpoint::Peer>> peers_;  // by rail and name
  std::size_t slab_bytes_ = 0;                                // of all slabs
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<Slab*> spare_slabs_;  // of streams that ended
  std::vector<std::unique_ptr<Stream>> leaving_;
  std::array<Completion, 32> batch_;
  std::int64_t idle_since_ns_ = 0;  // time of the last `progress` without a completion; 0 after one with completions
  Fd wake_timer_;
  int pid_;
};

}  // namespace netfold::transport::fabric
