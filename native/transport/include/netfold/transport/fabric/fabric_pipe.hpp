// A pipe over a stream of a port, beside the connection of the handshake.
//
// Nothing of what is said goes over that connection, but one word at the end: how many segments and writes there were.
// It shows that the peer is gone, which a provider may never notice. Who reads that word still waits for the segments
// that are on their way; who finds the connection broken without it does so for kLastNs. Only then is the pipe closed.
//
// The word is also said when the port's endpoint had to be closed: a peer that wants back what it granted then has its
// answer. A peer that went without it may have been in the middle of a write that its own host still delivers, so what
// was granted to it is had back by closing our endpoint, and not otherwise.
#pragma once

#include <netfold/transport/fabric/stream_mux.hpp>

namespace netfold::transport::fabric {

class FabricPipe final : public Pipe {
 public:
  FabricPipe(std::shared_ptr<StreamMux> mux, StreamMux::Stream* stream);
  ~FabricPipe() override;
  FabricPipe(const FabricPipe&) = delete;
  FabricPipe& operator=(const FabricPipe&) = delete;

  // Before it, the end of the peer shows by the provider alone.
  void watch(std::unique_ptr<Pipe> connection) { connection_ = std::move(connection); }
  const std::shared_ptr<StreamMux>& mux() const { return mux_; }
  StreamMux::Stream* stream() const { return stream_; }

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
  bool is_posted(std::uint64_t name) override { return mux_->is_offered(stream_, name); }
  Io put(std::span<const iovec> pieces, std::uint64_t name) override { return sent(mux_->put(stream_, pieces, name)); }
  std::size_t bytes_in_flight() override { return mux_->bytes_in_flight(stream_); }
  bool cancel() override;
  bool must_force_close() override;
  void force_close() override;
  std::unique_ptr<Scratch> scratch(std::size_t bytes) override { return mux_->scratch(bytes); }
  std::unique_ptr<RegistrationLease> lease(std::byte* data, std::size_t bytes) override {
    return mux_->lease(data, bytes, RegistrationCache::Lifetime::operation);
  }

  int rails() const override { return connection_ == nullptr ? 0 : connection_->rails(); }
  ResumableSocket* rail(int number) override { return connection_->rail(number); }

 private:
  // Calls without an answer between two looks at the connection: a system call each.
  static constexpr int kQuietCalls = 256;
  // How long what a peer said last may take after its connection ended.
  static constexpr std::int64_t kLastNs = 200'000'000;

  Io sent(std::size_t bytes);
  void send_final_counts(const StreamMux::FinalCounts& word);
  void check_connection();
  bool is_over();
  Io closed() const {
    return {.closed = true, .error = error_, .why = why_.empty() ? nullptr : &why_, .is_ours = is_ours_};
  }

  std::shared_ptr<StreamMux> mux_;
  StreamMux::Stream* stream_;
  std::unique_ptr<Pipe> connection_;
  mutable int quiet_calls_ = 0;
  StreamMux::FinalCounts final_counts_;
  bool sent_final_counts_ = false;
  std::size_t heard_ = 0;  // of the last word
  bool is_gone_ = false;   // without it
  std::int64_t over_since_ns_ = -1;
  int error_ = 0;
  std::string why_;
  bool is_ours_ = false;
};

}  // namespace netfold::transport::fabric
