#include <netfold/transport/fabric/fabric_pipe.hpp>

#include <utility>

namespace netfold::transport::fabric {

FabricPipe::FabricPipe(std::shared_ptr<StreamMux> mux, Stream* stream) : mux_(std::move(mux)), stream_(stream) {}

FabricPipe::~FabricPipe() { send_final_counts(mux_->close(stream_)); }

void FabricPipe::send_final_counts(const StreamMux::FinalCounts& counts) {
  if (connection_ == nullptr || std::exchange(sent_final_counts_, true)) return;
  const iovec piece{const_cast<StreamMux::FinalCounts*>(&counts), sizeof counts};
  connection_->send({&piece, 1});
}

Pipe::Io FabricPipe::send(std::span<const iovec> pieces) { return sent(mux_->send(stream_, pieces)); }

Pipe::Io FabricPipe::sent(std::size_t bytes) {
  if (bytes > 0) return {.bytes = bytes};
  if (++quiet_calls_ >= kQuietCalls) check_connection();
  return is_over() ? closed() : Io{};
}

bool FabricPipe::cancel() {
  check_connection();
  if (has_final_counts()) mux_->confirm_cancel(stream_, final_counts_.writes);
  const bool is_done = mux_->cancel(stream_);
  if (!mux_->is_open()) send_final_counts(mux_->final_counts(stream_));
  return is_done;
}

void FabricPipe::force_close() {
  mux_->force_close("a peer or the provider could still use memory of an operation that failed");
  send_final_counts(mux_->final_counts(stream_));
}

Pipe::Io FabricPipe::receive(std::span<const iovec> pieces) {
  const std::size_t bytes = mux_->receive(stream_, pieces);
  if (bytes > 0) return {.bytes = bytes};
  if (++quiet_calls_ >= kQuietCalls) check_connection();
  if (!is_over()) return {};
  const bool is_all = has_final_counts() && mux_->read(stream_) == final_counts_.segments;
  return is_all || now_ns() - over_since_ns_ > kLastNs ? closed() : Io{};
}

// Reads the peer's FinalCounts from the connection, or finds that it ended without them.
void FabricPipe::check_connection() {
  quiet_calls_ = 0;
  if (connection_ == nullptr || has_final_counts()) return;
  const iovec piece{reinterpret_cast<std::byte*>(&final_counts_) + final_count_bytes_,
                    sizeof final_counts_ - final_count_bytes_};
  const Io io = connection_->receive({&piece, 1});
  final_count_bytes_ += io.bytes;
  is_gone_ |= io.closed && !has_final_counts();
  if (over_since_ns_ >= 0 || (!has_final_counts() && !io.closed)) return;
  over_since_ns_ = now_ns();
  if (!io.closed) return;
  error_ = io.error;
  if (io.why != nullptr) why_ = *io.why;
}

bool FabricPipe::is_over() {
  if (over_since_ns_ >= 0) return true;
  std::string failure = mux_->failure(stream_);
  if (failure.empty()) return false;
  // The connection may show a better reason: the peer left in order, or why it is gone.
  check_connection();
  is_ours_ = over_since_ns_ < 0;
  if (is_ours_) over_since_ns_ = now_ns();
  if (why_.empty()) why_ = std::move(failure);
  return true;
}

void FabricPipe::wait_for(short events, std::vector<pollfd>& fds) const {
  quiet_calls_ = kQuietCalls;
  mux_->wait_for(stream_, events, fds);
  if (over_since_ns_ >= 0) {
    mux_->wake_after(fds, StreamMux::kPollIntervalNs);  // until kLastNs is over
  } else if (connection_ != nullptr) {
    connection_->wait_for(POLLIN | POLLRDHUP, fds);
  }
}

bool FabricPipe::hung_up() {
  check_connection();
  return is_over();
}

bool FabricPipe::flush() {
  const bool is_connection_flushed = connection_ == nullptr || connection_->flush();
  return (mux_->settled(stream_) || is_over()) && is_connection_flushed;
}

void FabricPipe::wait_to_flush(std::vector<pollfd>& fds) {
  if (connection_ != nullptr) connection_->wait_to_flush(fds);
  if (!mux_->settled(stream_)) mux_->wait_for(stream_, 0, fds);
}

}  // namespace netfold::transport::fabric
