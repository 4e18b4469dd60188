// The common part of ring, halving-doubling, trees, chain and Bruck: streams of chunks to and from a few peers.
//
// An algorithm is a plan: its constructor opens streams and lists, in order, the chunks of each stream. A chunk may
// wait for a mark: "so many chunks of that stream are complete". A received chunk is stored in place or reduced with an
// operand. PipelinedPlan runs the plan: it sends every chunk whose mark is reached as soon as the socket takes it, and
// reads, reduces and continues with the chunks that have become possible. So a plan in small chunks is a pipeline.
//
// On the wire a stream is one MessageHeader, sent at once, and a ChunkMarker before every chunk; empty chunks are left
// out. Between two chunks a stream can end with an abort: the reason and the rank at fault. Every rank passes an abort
// on.
//
// Where a pipe has RMA (transport/pipe.hpp), large chunks go by it. A receiver posts the buffers of the next kAhead
// chunks, each as soon as it may be written. A sent chunk is complete once the pipe has returned its memory. A chunk's
// name is the call's sequence number and the chunk's number in its stream, which both ends count alike.
//
// A plan must not contain a circular wait: order its transfers by a time that grows along every mark and every stream.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/reduction.hpp>
#include <netfold/collective/team.hpp>

#include <optional>

namespace netfold::collective {

// Elements.
struct Span {
  std::size_t first = 0;
  std::size_t count = 0;
};
// Part `index` of `parts` in equal proportion: sizes differ by one at most.
Span part(Span whole, std::size_t parts, std::size_t index);
// The same of a buffer, in units of `unit` bytes.
Buffer part(const Buffer& whole, std::size_t parts, std::size_t index, std::size_t unit);

class PipelinedPlan : public Algorithm {
 public:
  Progress poll(std::int64_t now_ns) final;
  void wait_for(WaitSet& set) const final;
  std::vector<int> awaited() const final;
  bool awaited_may_wait() const final;
  std::uint64_t settled_bytes() const final { return received_bytes_; }

 protected:
  // Reached when so many chunks of a stream are complete: taken by the socket, or received and stored.
  struct Mark {
    int stream = -1;
    std::size_t chunks = 0;
  };
  struct Send {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Mark after;
    // The chunk is a final result that leaves its owner. In a narrower wire format the owner keeps the rounded values
    // that the other ranks get.
    bool finished = false;
  };
  // Received in place; with an operand: into = operand + arrived (`arrived_first`: arrived + operand).
  // arrived_of, operand_of: the position whose tensor's values these are; Reduction::kSum: a sum of several.
  // finishes: the result has the values of all ranks.
  struct Receive {
    std::byte* into = nullptr;
    std::size_t bytes = 0;
    const std::byte* operand = nullptr;
    bool arrived_first = false;
    Mark after;
    int arrived_of = Reduction::kSum;
    int operand_of = Reduction::kSum;
    bool finishes = false;
  };

  // Borrows call and mesh for its lifetime.
  PipelinedPlan(const Call& call, transport::Mesh& mesh, Team team);

  const Call& call() const { return call_; }
  const Team& team() const { return team_; }
  std::size_t element_bytes() const { return element_bytes_; }
  // The number of chunks of a block of so many bytes. A chunk is a quarter of the block, so that a step costs the
  // latency of a chunk and not of the block. A chunk has at least a few socket calls' bytes, and at most what stays in
  // the L2 cache beside its scratch. Over a fabric, where a chunk is three messages: half the block, and a minimum
  // four times as large.
  std::size_t chunks_of(std::size_t block_bytes) const;
  // The same for a pipeline through many hops, which needs more and smaller chunks.
  std::size_t pipeline_chunks_of(std::size_t block_bytes) const;

  // The one stream to or from a position, which is wrapped round the team. The first call opens the stream.
  int to(int position) { return open(outs_, position); }
  int from(int position) { return open(ins_, position); }
  // Appends a chunk. Returns the mark that is reached when the chunk is complete.
  Mark add(int stream, const Send& chunk) { return append(outs_[index_[static_cast<std::size_t>(stream)]], chunk); }
  Mark add(int stream, const Receive& chunk) { return append(ins_[index_[static_cast<std::size_t>(stream)]], chunk); }
  // Ends the plan. The last line of a constructor.
  void finish_plan();
  // Adds the copies that follow the last chunk.
  virtual void add_last_copies(BlockCopies&) {}

 private:
  // The longest time that a failure waits for the rest of a half-sent chunk.
  static constexpr std::int64_t kLastChunkNs = 100'000'000;
  // Chunks in one socket call.
  static constexpr std::size_t kBatchChunks = 16;
  // Chunks that a receiver posts ahead, where the peer writes them by RMA.
  static constexpr std::size_t kAhead = 4;

  struct Out {
    int peer = -1;
    int stream = -1;
    MessageHeader header;
    std::size_t header_sent = 0;
    std::vector<Send> chunks;
    std::size_t next = 0;
    std::size_t sent = 0;            // bytes of the next chunk, its marker included
    std::size_t returned = 0;        // chunks that are complete
    std::size_t in_flight = 0;       // bytes of the chunks that are sent and not complete
    std::size_t slice = 0;           // bytes that this poll may still send
    bool encoded = false;            // staging holds the next chunk
    std::vector<std::byte> staging;  // the next chunk in the wire format, where that differs
    bool all_sent() const { return header_sent == sizeof header && next == chunks.size(); }
    bool done() const { return all_sent() && returned == next; }
  };
  struct In {
    int peer = -1;
    int stream = -1;
    MessageHeader header;
    MessageHeader expected;
    std::size_t header_received = 0;
    std::vector<Receive> chunks;
    std::size_t next = 0;
    std::size_t received = 0;  // bytes of the next chunk, its marker included
    std::size_t posted = 0;    // chunks that are posted, or need no posting
    ChunkMarker marker = ChunkMarker::chunk;
    transport::Pipe::Scratch staging;  // slots of chunks that are not received in place; the pipe's, if it has any
    std::size_t slots = 1;
    std::size_t slot_bytes = 0;
    std::optional<IncomingHeader> unexpected;  // what came instead of the header or of a chunk
    bool has_header() const { return header_received == sizeof header; }
    bool done() const { return has_header() && next == chunks.size(); }
  };

  template <class Stream>
  int open(std::vector<Stream>& streams, int position) {
    const int peer = team_.rank(team_.wrapped(position));
    for (const Stream& stream : streams) {
      if (stream.peer == peer) return stream.stream;
    }
    index_.push_back(streams.size());
    Stream& stream = streams.emplace_back();
    stream.peer = peer;
    stream.stream = static_cast<int>(complete_.size());
    complete_.push_back(0);
    return stream.stream;
  }
  template <class Stream, class Chunk>
  static Mark append(Stream& stream, const Chunk& chunk) {
    if (chunk.bytes == 0) return chunk.after;
    stream.chunks.push_back(chunk);
    return {stream.stream, stream.chunks.size()};
  }

  bool reached(const Mark& mark) const;
  std::size_t wire_bytes_of(std::size_t bytes) const;
  bool uses_rma(int peer, std::size_t bytes) const { return !converts_ && mesh_.uses_rma(peer, bytes); }
  std::uint64_t name_of(std::size_t chunk) const { return (std::uint64_t{call_.sequence} << 32) + chunk; }
  void lease_tensors();

  bool push();
  bool advance(Out& out);
  bool put(Out& out);
  bool reclaim(Out& out);
  std::size_t gather(Out& out, std::span<iovec> parts, std::size_t* bytes);
  const std::byte* encoded(Out& out);
  void account(Out& out, std::size_t bytes);

  bool advance(In& in);
  bool may_read_values(const In& in) const;
  bool may_read(const In& in) const;
  std::byte* target(In& in, std::size_t chunk);
  void post_receives(In& in);
  bool overlaps(const In& in, std::size_t chunk) const;
  void store(In& in);
  bool read_abort(In& in, std::span<const std::byte> early);

  void record(Failure failure);
  void record_lost(const Out& out, const transport::Mesh::Io& io);
  template <class Visit>
  void for_each_silent(const Visit& visit) const;
  void find_gave_up();
  Progress finish_chunks(std::int64_t now_ns);

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  Reduction reduction_;
  std::size_t element_bytes_;
  std::size_t wire_element_bytes_;
  bool converts_;
  std::vector<std::size_t> complete_;  // chunks, by stream
  std::uint64_t received_bytes_ = 0;   // of whole chunks
  std::vector<std::size_t> index_;     // of a stream in outs_ or ins_
  std::vector<Out> outs_;
  std::vector<In> ins_;
  TensorRegistrations tensor_registrations_;
  std::vector<std::byte> decoded_;  // a chunk in the tensor's format, where the wire format differs
  BlockCopies copies_;
  std::size_t slice_bytes_ = 0;  // of a stream
  bool is_complete_ = false;     // all chunks are
  GaveUpTimer gave_up_timer_;
  std::int64_t give_up_ns_ = -1;
};

}  // namespace netfold::collective
