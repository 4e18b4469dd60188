// A pipe over a stream of StreamMux, beside a connection to the same rank.
//
// The connection is made when the pipe is first used, as a TCP pipe's. The stream is opened when this rank or the peer
// first sends or posts memory, so that a rank has buffers and addresses only for the ranks that an algorithm needs. The
// connection carries what both ends must agree on, and shows the end of the peer, which a provider may never notice:
//
//   message   content          meaning
//   offer     StreamMux::offer the sender has opened its end of the stream
//   ready     -                a message of the peer has come over the stream
//   last      bytes            the last bytes of a sender that is not `reached` (send_last)
//   refused   a sentence       the sender cannot open or connect its end
//   ended     FinalCounts      the sender closes: how many segments and writes it sent in all
//
//   state     event                                         becomes   action
//   bare      receive, hung_up                              bare      make the connection
//   bare      send, put, is_posted, post_receive            offered   open the stream; send an offer
//   bare      offer                                         linked    open the stream; send an offer; connect the stream
//   offered   offer                                         linked    connect the stream
//   linked    nothing came over the stream for a while      linked    greet again
//   linked    a message over the stream                     reached   send `ready`
//   reached   `ready` was sent and received                 up        -
//   any       the stream cannot be opened or connected      over      send `refused`
//   any       refused, ended, the connection's end          over      -
//   any       the stream failed                             over      -
//
// Both ends may offer at the same time; each offer is for the end that the other rank sends to. Bytes are sent from
// `reached` on: a message that came proves that the endpoints are connected. Earlier ones may be lost (advance).
// Until both ends are up, `flush` returns false: a provider may need both ranks' calls to connect them, so an idle
// rank goes on too. A bare pipe whose connection was made also waits for an offer so.
//
// A pipe that has received FinalCounts still waits for the segments that are on their way. After a connection that broke
// without FinalCounts, the pipe waits kLastNs for segments. Then the pipe is closed.
//
// FinalCounts are also sent when the mux's endpoint had to be closed; they answer a peer that cancels its grants. A
// peer that ended without FinalCounts may have begun a write that its host still delivers. Memory that was granted to
// such a peer is taken back only by closing this rank's endpoint.
#pragma once

#include <netfold/transport/fabric/stream_mux.hpp>
#include <netfold/transport/pipe_maker.hpp>

namespace netfold::transport::fabric {

// The objects and settings that the pipes of one mesh share.
struct FabricLane {
  std::shared_ptr<StreamMux> mux;
  std::shared_ptr<Doorbell> doorbell;  // of the group
  std::size_t rma_min_bytes = 0;       // of the shortest part that goes by RMA, agreed by all ranks; 0: none does
  std::shared_ptr<ReadableStreams> readable = std::make_shared<ReadableStreams>();
  std::vector<int> over;  // ranks whose pipes may have ended since `take_readable`
};

class FabricPipe final : public Pipe {
 public:
  // connection: to the same rank; made when it is first used.
  FabricPipe(std::shared_ptr<FabricLane> lane, int peer, std::unique_ptr<Pipe> connection);
  ~FabricPipe() override;
  FabricPipe(const FabricPipe&) = delete;
  FabricPipe& operator=(const FabricPipe&) = delete;

  Io send(std::span<const iovec> pieces) override;
  Io send_last(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override { return receive_into_gpu({}, pieces); }
  Io receive_into_gpu(std::span<std::byte> gpu, std::span<const iovec> pieces) override;
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override;
  std::size_t unconfirmed() const override { return stream_ == nullptr ? 0 : mux().unconfirmed(stream_); }
  bool flush() override;
  void wait_to_flush(std::vector<pollfd>& fds) override;
  bool was_connected() const override { return connection_->was_connected(); }
  bool has_unsent() override;

  bool uses_rma(std::size_t bytes) const override { return mux().uses_rma(lane_->rma_min_bytes, bytes); }
  bool post_receive(std::uint64_t name, std::byte* into, std::size_t bytes, GpuMemory* gpu) override {
    return open() && mux().post_receive(stream_, name, into, bytes, gpu);
  }
  std::size_t gpu_part_bytes() const override { return mux().gpu_part_bytes(); }
  bool is_posted(std::uint64_t name) override;
  Io put(std::span<const iovec> pieces, std::uint64_t name, GpuMemory* gpu) override;
  std::size_t bytes_in_flight() override { return stream_ == nullptr ? 0 : mux().bytes_in_flight(stream_); }
  bool cancel() override;
  bool must_force_close() override { return is_gone_ && stream_ != nullptr; }
  void force_close() override;
  Scratch scratch(std::size_t bytes) override { return mux().scratch(bytes); }

  int rails() const override { return connection_->rails(); }
  ResumableSocket* rail(int number) override { return connection_->rail(number); }

 private:
  enum class MessageType : std::uint32_t { offer = 1, ready, last, refused, ended };
  // Before every message on the connection. Little-endian.
  struct MessageHeader {
    MessageType type = MessageType::offer;
    std::uint32_t bytes = 0;  // behind this header
  };
  static constexpr std::size_t kMaxMessageBytes = 64 << 10;
  // Calls without bytes between two checks of the connection; each check is a system call.
  static constexpr int kQuietCalls = 256;
  // How long the peer's last segments may take after its connection ended.
  static constexpr std::int64_t kLastNs = 200'000'000;

  StreamMux& mux() const { return *lane_->mux; }
  bool is_reached() const { return is_linked_ && mux().is_heard(stream_); }
  bool is_up() const { return is_linked_ && sent_ready_ && peer_ready_; }
  // Whether messages on the connection are still to be sent, or to come, before `flush` may be true.
  bool awaits_connection() const { return over_since_ns_ < 0 && (!is_up() || !outbox_.empty()); }
  bool has_live_connection() const;
  // Opens the stream, unless it is open. False: the pipe is over.
  bool open();
  void link(std::span<const std::byte> offer);
  void refuse(const std::string& why);
  // Sends and handles messages on the connection.
  void advance();
  Io sent(std::size_t bytes);
  void write(MessageType type, std::span<const std::byte> content);
  void send_outbox();
  void send_final_counts(const StreamMux::FinalCounts& counts);
  StreamMux::FinalCounts final_counts() const {
    return stream_ == nullptr ? StreamMux::FinalCounts{} : mux().final_counts(stream_);
  }
  void check_connection();
  void handle_messages();
  void handle(MessageType type, std::span<const std::byte> content);
  void end();
  bool is_over();
  Io closed() const {
    return {.closed = true,
            .error = error_,
            .why = why_.empty() ? nullptr : &why_,
            .is_ours = is_ours_,
            .is_orderly = is_orderly_};
  }

  std::shared_ptr<FabricLane> lane_;
  const int peer_;
  std::unique_ptr<Pipe> connection_;
  Stream* stream_ = nullptr;  // null: bare
  bool is_linked_ = false;
  bool sent_ready_ = false;
  bool peer_ready_ = false;
  std::int64_t greeted_ns_ = 0;
  std::vector<std::byte> outbox_;  // for the connection; at most a message of each type
  std::vector<std::byte> inbox_;   // the beginning of a message from the connection
  std::vector<std::byte> last_;    // bytes of `last` that were not read
  mutable int quiet_calls_ = kQuietCalls;
  std::optional<StreamMux::FinalCounts> final_counts_;  // the peer's
  bool sent_final_counts_ = false;
  bool is_gone_ = false;             // the peer ended without FinalCounts
  bool is_listed_ = false;           // in lane_->over, or not read since
  std::int64_t over_since_ns_ = -1;  // when the end of the peer or of the stream was found; -1: neither has ended
  int error_ = 0;
  std::string why_;
  bool is_ours_ = false;
  bool is_orderly_ = false;
};

// Makes the pipes of one mesh over a fabric.
class FabricPipeMaker final : public PipeMaker {
 public:
  // connections: makes the connection beside each stream.
  FabricPipeMaker(FabricLane lane, std::unique_ptr<PipeMaker> connections)
      : lane_(std::make_shared<FabricLane>(std::move(lane))), connections_(std::move(connections)) {}

  std::unique_ptr<Pipe> make(int peer) override { return over(peer, connections_->make(peer)); }
  // The pipe to a rank whose connection is made.
  std::unique_ptr<Pipe> over(int peer, std::unique_ptr<Pipe> connection) {
    return std::make_unique<FabricPipe>(lane_, peer, std::move(connection));
  }
  bool prefers_large_chunks() const override { return true; }
  bool may_use_rma() const override { return lane_->rma_min_bytes > 0; }
  bool needs_progress() const override { return true; }
  Pipe::RegistrationLease lease(std::byte* data, std::size_t bytes) override {
    return lane_->mux->lease(data, bytes, RegistrationCache::Lifetime::operation);
  }
  void take_readable(std::vector<int>& peers) override;
  void wait_for_readable(std::vector<pollfd>& fds) override;

 private:
  std::shared_ptr<FabricLane> lane_;
  std::unique_ptr<PipeMaker> connections_;
};

}  // namespace netfold::transport::fabric
