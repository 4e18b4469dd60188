#include <netfold/transport/fabric/fabric_pipe.hpp>

#include <chrono>
#include <utility>

namespace netfold::transport::fabric {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

FabricPipe::FabricPipe(std::shared_ptr<Port> port, Port::Stream* stream) : port_(std::move(port)), stream_(stream) {}

FabricPipe::~FabricPipe() { say_last(port_->close(stream_)); }

void FabricPipe::say_last(const Port::LastWord& word) {
  if (connection_ == nullptr || std::exchange(said_last_, true)) return;
  const iovec piece{const_cast<Port::LastWord*>(&word), sizeof word};
  connection_->send({&piece, 1});
}

Pipe::Io FabricPipe::send(std::span<const iovec> pieces) { return sent(port_->send(stream_, pieces)); }

Pipe::Io FabricPipe::sent(std::size_t bytes) {
  if (bytes > 0) return {.bytes = bytes};
  if (++quiet_calls_ >= kQuietCalls) look();
  return over_since_ns_ >= 0 || is_over() ? closed() : Io{};
}

bool FabricPipe::cancel() {
  look();
  if (heard_ == sizeof last_word_) port_->disown(stream_, last_word_.writes);
  const bool is_back = port_->cancel(stream_);
  if (!port_->is_open()) say_last(port_->last_word(stream_));
  return is_back;
}

bool FabricPipe::must_force_close() { return is_gone_; }

void FabricPipe::force_close() {
  port_->force_close("memory that was lent to a rank, or granted to it, was not given back");
  say_last(port_->last_word(stream_));
}

Pipe::Io FabricPipe::receive(std::span<const iovec> pieces) {
  const std::size_t got = port_->receive(stream_, pieces);
  if (got > 0) return {.bytes = got};
  if (++quiet_calls_ >= kQuietCalls) look();
  if (!is_over()) return {};
  const bool is_all = heard_ == sizeof last_word_ && port_->read(stream_) == last_word_.segments;
  return is_all || now_ns() - over_since_ns_ > kLastNs ? closed() : Io{};
}

// At the connection: what the peer said last, or that it ended without a word.
void FabricPipe::look() {
  quiet_calls_ = 0;
  if (connection_ == nullptr || heard_ == sizeof last_word_) return;
  const iovec piece{reinterpret_cast<std::byte*>(&last_word_) + heard_, sizeof last_word_ - heard_};
  const Io io = connection_->receive({&piece, 1});
  heard_ += io.bytes;
  is_gone_ |= io.closed && heard_ < sizeof last_word_;
  if (over_since_ns_ >= 0 || (heard_ < sizeof last_word_ && !io.closed)) return;
  over_since_ns_ = now_ns();
  if (!io.closed) return;
  error_ = io.error;
  if (io.why != nullptr) why_ = *io.why;
}

bool FabricPipe::is_over() {
  if (over_since_ns_ >= 0) return true;
  std::string failure = port_->failure(stream_);
  if (failure.empty()) return false;
  // The connection may know better: that the peer left in order, or why it is gone.
  look();
  is_ours_ = over_since_ns_ < 0;
  if (is_ours_) over_since_ns_ = now_ns();
  if (why_.empty()) why_ = std::move(failure);
  return true;
}

void FabricPipe::wait_for(short events, std::vector<pollfd>& fds) const {
  quiet_calls_ = kQuietCalls;
  port_->wait_for(stream_, events, fds);
  if (over_since_ns_ >= 0) {
    port_->nap(fds, Port::kNapNs);  // until what is on its way has had its time
  } else if (connection_ != nullptr) {
    connection_->wait_for(POLLIN | POLLRDHUP, fds);
  }
}

bool FabricPipe::hung_up() {
  look();
  return over_since_ns_ >= 0 || is_over();
}

bool FabricPipe::flush() {
  const bool connection = connection_ == nullptr || connection_->flush();
  return (port_->settled(stream_) || is_over()) && connection;
}

void FabricPipe::wait_to_flush(std::vector<pollfd>& fds) {
  if (connection_ != nullptr) connection_->wait_to_flush(fds);
  if (!port_->settled(stream_)) port_->wait_for(stream_, 0, fds);
}

}  // namespace netfold::transport::fabric
