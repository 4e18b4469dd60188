// A pipe over a stream of StreamMux, beside the connection of the handshake.
//
// The connection carries one message at the end, FinalCounts: how many segments and writes were sent. It shows that the
// peer is gone, which a provider may never notice. A pipe that has received FinalCounts still waits for the segments
// that are on their way. After a connection that broke without FinalCounts, the pipe waits kLastNs for segments. Then
// the pipe is closed.
//
// FinalCounts are also sent when the mux's endpoint had to be closed; they answer a peer that cancels its grants. A
// peer that ended without FinalCounts may have begun a write that its host still delivers. Memory that was granted to
// such a peer is taken back only by closing this rank's endpoint.
#pragma once

#include <netfold/transport/fabric/stream_mux.hpp>

namespace netfold::transport::fabric {

class FabricPipe final : public Pipe {
 public:
  FabricPipe(std::shared_ptr<StreamMux> mux, Stream* stream);
  ~FabricPipe() override;
  FabricPipe(const FabricPipe&) = delete;
  FabricPipe& operator=(const FabricPipe&) = delete;

  // Watches a connection to the same rank. Before this call only the provider shows the end of the peer.
  void watch(std::unique_ptr<Pipe> connection) { connection_ = std::move(connection); }
  const std::shared_ptr<StreamMux>& mux() const { return mux_; }
  Stream* stream() const { return stream_; }

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override;
  std::size_t unconfirmed() const override { return mux_->unconfirmed(stream_); }
  bool flush() override;
  void wait_to_flush(std::vector<pollfd>& fds) override;
  bool needs_progress() const override { return true; }

  bool prefers_large_chunks() const override { return true; }
  bool uses_rma(std::size_t bytes) const override { return mux_->uses_rma(stream_, bytes); }
  bool post_receive(std::uint64_t name, std::byte* into, std::size_t bytes) override {
    return mux_->post_receive(stream_, name, into, bytes);
  }
  bool is_posted(std::uint64_t name) override { return mux_->is_posted(stream_, name); }
  Io put(std::span<const iovec> pieces, std::uint64_t name) override { return sent(mux_->put(stream_, pieces, name)); }
  std::size_t bytes_in_flight() override { return mux_->bytes_in_flight(stream_); }
  bool cancel() override;
  bool must_force_close() override { return is_gone_; }
  void force_close() override;
  Scratch scratch(std::size_t bytes) override { return mux_->scratch(bytes); }
  RegistrationLease lease(std::byte* data, std::size_t bytes) override {
    return mux_->lease(data, bytes, RegistrationCache::Lifetime::operation);
  }

  int rails() const override { return connection_ == nullptr ? 0 : connection_->rails(); }
  ResumableSocket* rail(int number) override { return connection_->rail(number); }

 private:
  // Calls without bytes between two checks of the connection; each check is a system call.
  static constexpr int kQuietCalls = 256;
  // How long the peer's last segments may take after its connection ended.
  static constexpr std::int64_t kLastNs = 200'000'000;

  Io sent(std::size_t bytes);
  void send_final_counts(const StreamMux::FinalCounts& counts);
  bool has_final_counts() const { return final_count_bytes_ == sizeof final_counts_; }
  void check_connection();
  bool is_over();
  Io closed() const {
    return {.closed = true, .error = error_, .why = why_.empty() ? nullptr : &why_, .is_ours = is_ours_};
  }

  std::shared_ptr<StreamMux> mux_;
  Stream* stream_;
  std::unique_ptr<Pipe> connection_;
  mutable int quiet_calls_ = 0;
  StreamMux::FinalCounts final_counts_;  // the peer's
  std::size_t final_count_bytes_ = 0;    // of these, received
  bool sent_final_counts_ = false;
  bool is_gone_ = false;             // the peer ended without FinalCounts
  std::int64_t over_since_ns_ = -1;  // when the end of the peer or of the stream was found; -1: neither has ended
  int error_ = 0;
  std::string why_;
  bool is_ours_ = false;
};

}  // namespace netfold::transport::fabric
