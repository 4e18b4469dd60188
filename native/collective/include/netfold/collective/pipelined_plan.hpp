// What ring, halving-doubling, trees, chain and Bruck share: streams of chunks to and from a few peers.
//
// An algorithm is a plan: in its constructor it opens streams and lists, in order, the chunks that go through each.
// A chunk may have to wait for a mark, "so many chunks of that stream are through"; a received one is put in place or
// folded into what is there. The machine below does the rest: it sends what may go as soon as the socket takes it,
// reads, folds, and goes on with what has become possible, so that a plan in small chunks is a pipeline.
//
// On the wire a stream is one MessageHeader, sent at once, and a ChunkMarker before every chunk; empty chunks are left
// out. Between two chunks a stream can end with the reason and the rank at fault, and every rank passes that on.
//
// Where a pipe has a direct path, large chunks go by it (transport/pipe.hpp): a receiver names the places of the next
// kAhead chunks, as soon as it might read into them, and a chunk that was sent is through once its memory is back. A
// chunk's name is the call's number and the chunk's in its stream, which both ends count alike.
//
// Plans must not wait in circles: order a plan's transfers by a time that grows along every mark and every stream.
#pragma once

#include <netfold/collective/message.hpp>
#include <netfold/collective/team.hpp>
#include <netfold/collective/tensor_registrations.hpp>

#include <optional>

namespace netfold::collective {

// Elements.
struct Span {
  std::size_t first = 0;
  std::size_t count = 0;
};
// Part `index` of `parts`, by proportion: sizes differ by one at most.
Span part(Span whole, std::size_t parts, std::size_t index);
class PipelinedPlan : public Algorithm {
 public:
  Progress poll(std::int64_t now_ns) final;
  void wait_for(WaitSet& set) const final;
  std::vector<int> awaited() const final;
  bool awaited_may_wait() const final;
  std::uint64_t settled_bytes() const final { return received_bytes_; }

 protected:
  // Reached when so many chunks of a stream are through: handed to the socket, or received and folded.
  struct Mark {
    int stream = -1;
    std::size_t chunks = 0;
  };
  struct Send {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Mark after;
    // A finished value that leaves its owner: in a narrower wire format, keep what the others will get.
    bool finished = false;
  };
  // Received in place, or, with `fold`, into = fold + arrived (`arrived_first`: arrived + fold).
  struct Receive {
    std::byte* into = nullptr;
    std::size_t bytes = 0;
    const std::byte* operand = nullptr;
    bool arrived_first = false;
    Mark after;
  };

  // Borrows call and mesh for its life.
  PipelinedPlan(const Call& call, transport::Mesh& mesh, Team team);

  const Call& call() const { return call_; }
  const Team& team() const { return team_; }
  std::size_t element_bytes() const { return element_bytes_; }
  // How many chunks a block of so many bytes travels in: a quarter of the block, so that a step costs the latency of a
  // chunk and not of the block; at least a few socket calls' worth, at most what stays in the L2 cache beside its
  // scratch. Over a fabric, where a chunk is three messages, half the block, and four times as much at least.
  std::size_t chunks_of(std::size_t block_bytes) const;
  // As above for a pipeline through many hops, which wants more and smaller chunks.
  std::size_t pipeline_chunks_of(std::size_t block_bytes) const;

  // The one stream in that direction; opened when first asked for.
  int to(int position);
  int from(int position);
  // Appends a chunk; the mark that is reached when it is through.
  Mark add(int stream, const Send& chunk);
  Mark add(int stream, const Receive& chunk);
  // Ends the plan. Last line of a constructor.
  void finish_plan();
  // Once, when the first chunks are with the sockets: what need not be done before.
  virtual void after_first_sends() {}
  // After the last chunk.
  virtual void finish() {}

 private:
  // Longest that a failure is held back for the rest of a chunk that is half sent.
  static constexpr std::int64_t kLastChunkNs = 100'000'000;
  // Chunks gathered by one socket call.
  static constexpr std::size_t kBatchChunks = 16;
  // Chunks that a receiver has places for, where they are written from afar.
  static constexpr std::size_t kAhead = 4;

  struct Out {
    int peer = -1;
    int stream = -1;
    MessageHeader header;
    std::size_t header_sent = 0;
    std::vector<Send> chunks;
    std::size_t next = 0;
    std::size_t sent = 0;       // bytes of the next chunk, its word included
    std::size_t back = 0;       // chunks that are through
    std::size_t in_flight = 0;  // bytes of those that were sent and are not
    bool encoded = false;
    std::vector<std::byte> staging;  // the next chunk in the wire format, where that differs
    bool all_sent() const { return header_sent == sizeof header && next == chunks.size(); }
    bool done() const { return all_sent() && back == next; }
  };
  struct In {
    int peer = -1;
    int stream = -1;
    MessageHeader header;
    MessageHeader expected;
    std::size_t header_got = 0;
    std::vector<Receive> chunks;
    std::size_t next = 0;
    std::size_t got = 0;     // bytes of the next chunk, its word included
    std::size_t placed = 0;  // chunks whose places the peer knows, or that need none
    ChunkMarker marker = ChunkMarker::chunk;
    std::vector<std::byte> staging;                     // what is not received in place
    std::unique_ptr<transport::Pipe::Scratch> scratch;  // the same, of a pipe that has some
    std::byte* stage = nullptr;
    std::size_t slots = 1;  // chunks that it has room for
    std::size_t slot_bytes = 0;
    std::optional<IncomingHeader> unexpected;  // what came in place of header or chunk
    bool done() const { return header_got == sizeof header && next == chunks.size(); }
  };

  bool reached(const Mark& mark) const;
  std::size_t wire_bytes_of(std::size_t bytes) const;
  bool uses_rma(int peer, std::size_t bytes) const { return !converts_ && mesh_.uses_rma(peer, bytes); }
  std::uint64_t name_of(std::size_t chunk) const { return (std::uint64_t{call_.sequence} << 32) + chunk; }
  void lease_tensors();
  bool put(Out& out);
  bool take_back(Out& out);
  void name_places(In& in);
  bool overlaps(const In& in, std::size_t chunk) const;
  bool push();
  std::size_t gather(Out& out, std::span<iovec> parts, std::size_t* bytes);
  bool advance(Out& out);
  const std::byte* encoded(Out& out);
  void account(Out& out, std::size_t bytes);
  bool advance(In& in);
  bool read_abort(In& in, std::span<const std::byte> early);
  void store(In& in);
  void note(Failure failure);
  Failure lost(int peer, Failure failure);
  Progress finish_chunks(std::int64_t now_ns);
  bool takes(const In& in) const;
  bool reads(const In& in) const;
  std::byte* target(In& in, std::size_t chunk);

  const Call& call_;
  transport::Mesh& mesh_;
  Team team_;
  std::size_t element_bytes_;
  std::size_t wire_element_bytes_;
  bool converts_;
  std::vector<std::size_t> through_;  // a stream each, by its number
  std::uint64_t received_bytes_ = 0;  // of whole chunks
  std::vector<std::size_t> index_;    // of a stream in outs_ or ins_
  std::vector<Out> outs_;
  std::vector<In> ins_;
  TensorRegistrations tensor_registrations_;
  std::vector<std::byte> decoded_;  // a chunk in the tensor's format, where the wire's differs
  bool begun_ = false;
  std::int64_t give_up_ns_ = -1;
};

}  // namespace netfold::collective
