#include <netfold/transport/fabric/fabric_pipe.hpp>
#include <netfold/transport/iovec_cursor.hpp>
#include <netfold/transport/tcp/resumable_socket.hpp>

#include <array>
#include <cstring>
#include <utility>

namespace netfold::transport::fabric {

FabricPipe::FabricPipe(std::shared_ptr<FabricLane> lane, int peer, std::unique_ptr<Pipe> connection)
    : lane_(std::move(lane)), peer_(peer), connection_(std::move(connection)) {}

FabricPipe::~FabricPipe() { send_final_counts(stream_ == nullptr ? StreamMux::FinalCounts{} : mux().close(stream_)); }

// --- The connection --------------------------------------------------------------------------------------------------

void FabricPipe::write(MessageType type, std::span<const std::byte> content) {
  const MessageHeader header{type, static_cast<std::uint32_t>(content.size())};
  const auto raw = std::as_bytes(std::span(&header, 1));
  outbox_.insert(outbox_.end(), raw.begin(), raw.end());
  outbox_.insert(outbox_.end(), content.begin(), content.end());
  send_outbox();
}

void FabricPipe::send_outbox() {
  while (!outbox_.empty()) {
    const iovec piece{outbox_.data(), outbox_.size()};
    const Io io = connection_->send({&piece, 1});
    if (io.bytes == 0) return;  // the reason of a closed connection is for check_connection
    outbox_.erase(outbox_.begin(), outbox_.begin() + static_cast<std::ptrdiff_t>(io.bytes));
  }
}

void FabricPipe::send_final_counts(const StreamMux::FinalCounts& counts) {
  // A peer to which no connection was made learns the end of this rank from its listener.
  if (!connection_->was_connected() || std::exchange(sent_final_counts_, true)) return;
  write(MessageType::ended, std::as_bytes(std::span(&counts, 1)));
}

// Handles the peer's messages, or finds that the connection ended without FinalCounts. Makes the connection.
void FabricPipe::check_connection() {
  quiet_calls_ = 0;
  std::array<std::byte, 4096> block;
  while (!final_counts_ && !is_gone_) {
    const iovec piece{block.data(), block.size()};
    const Io io = connection_->receive({&piece, 1});
    inbox_.insert(inbox_.end(), block.begin(), block.begin() + static_cast<std::ptrdiff_t>(io.bytes));
    handle_messages();
    if (io.closed && !final_counts_) {
      is_gone_ = true;
      // The reason of a refusal or of a failed stream is better.
      if (over_since_ns_ < 0) {
        error_ = io.error;
        is_orderly_ = io.is_orderly;
        if (io.why != nullptr) why_ = *io.why;
      }
      end();
    }
    if (io.bytes < block.size()) return;
  }
}

void FabricPipe::handle_messages() {
  std::size_t begin = 0;
  MessageHeader header;
  while (inbox_.size() - begin >= sizeof header) {
    std::memcpy(&header, inbox_.data() + begin, sizeof header);
    if (header.bytes > kMaxMessageBytes) {
      inbox_.clear();
      return refuse("rank " + std::to_string(peer_) + " sent a message of " + std::to_string(header.bytes) +
                    " bytes beside the fabric; at most " + std::to_string(kMaxMessageBytes) + " make sense");
    }
    if (inbox_.size() - begin - sizeof header < header.bytes) break;
    const auto whole = std::span(inbox_).subspan(begin + sizeof header, header.bytes);
    begin += sizeof header + header.bytes;
    handle(header.type, whole);
  }
  inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<std::ptrdiff_t>(begin));
}

void FabricPipe::handle(MessageType type, std::span<const std::byte> content) {
  switch (type) {
    case MessageType::offer:
      if (!is_linked_ && open()) link(content);
      return;
    case MessageType::ready:
      peer_ready_ = true;
      return;
    case MessageType::last:
      last_.assign(content.begin(), content.end());
      return;
    case MessageType::refused:
      if (over_since_ns_ < 0) {
        why_ = "it cannot use the fabric: ";
        why_.append(reinterpret_cast<const char*>(content.data()), content.size());
      }
      return end();
    case MessageType::ended:
      final_counts_.emplace();
      std::memcpy(&*final_counts_, content.data(), std::min(content.size(), sizeof *final_counts_));
      return end();
  }
}

// --- States ----------------------------------------------------------------------------------------------------------

bool FabricPipe::open() {
  if (stream_ != nullptr) return true;
  if (is_over()) return false;
  try {
    stream_ = mux().open(lane_->doorbell, lane_->readable, peer_);
    write(MessageType::offer, mux().offer(stream_));
  } catch (const Error& error) {
    refuse(error.what());
  }
  return stream_ != nullptr;
}

void FabricPipe::link(std::span<const std::byte> offer) {
  try {
    mux().connect(stream_, offer);
    greeted_ns_ = now_ns();
    is_linked_ = true;
  } catch (const Error& error) {
    refuse(error.what());
  }
}

void FabricPipe::refuse(const std::string& why) {
  if (over_since_ns_ >= 0) return;
  why_ = why;
  is_ours_ = true;
  write(MessageType::refused, std::as_bytes(std::span(why)));
  end();
}

void FabricPipe::end() {
  if (over_since_ns_ < 0) over_since_ns_ = now_ns();
  if (!std::exchange(is_listed_, true)) lane_->over.push_back(peer_);
}

bool FabricPipe::is_over() {
  if (over_since_ns_ >= 0) return true;
  std::string failure = stream_ == nullptr ? "" : mux().failure(stream_);
  if (failure.empty()) return false;
  // The connection may show a better reason: the peer left in order, or why it is gone.
  check_connection();
  is_ours_ = over_since_ns_ < 0;
  if (why_.empty()) why_ = std::move(failure);
  end();
  return true;
}

void FabricPipe::advance() {
  send_outbox();
  check_connection();
  if (!is_linked_ || is_up()) return;
  if (!sent_ready_ && is_reached()) {
    sent_ready_ = true;
    write(MessageType::ready, {});
  }
  // A hello may be lost: a rail may not lead there, and two endpoints that connect to each other at the same time drop
  // one of the two connections with what was sent over it (tcp;ofi_rxm of libfabric 1.17).
  if (!peer_ready_ && now_ns() - greeted_ns_ >= Sender::kProbeIntervalNs) {
    greeted_ns_ = now_ns();
    mux().greet(stream_);
  }
}

bool FabricPipe::has_live_connection() const {
  for (int number = 0; number < connection_->rails(); ++number) {
    const ResumableSocket& rail = *connection_->rail(number);
    if (rail.descriptor() >= 0 || rail.has_unread()) return true;
  }
  return false;
}

// --- Bytes -----------------------------------------------------------------------------------------------------------

Pipe::Io FabricPipe::send(std::span<const iovec> pieces) {
  if (open() && !is_up()) advance();
  return sent(is_reached() ? mux().send(stream_, pieces) : 0);
}

Pipe::Io FabricPipe::send_last(std::span<const iovec> pieces) {
  if (is_reached()) return send(pieces);
  if (is_over()) return closed();
  std::vector<std::byte> bytes;
  for (const iovec& piece : pieces) {
    const auto* data = static_cast<const std::byte*>(piece.iov_base);
    bytes.insert(bytes.end(), data, data + piece.iov_len);
  }
  if (bytes.size() > kMaxMessageBytes) return {};
  write(MessageType::last, bytes);
  return {.bytes = bytes.size()};
}

bool FabricPipe::is_posted(std::uint64_t name) {
  if (open() && !is_up()) advance();
  return is_linked_ && mux().is_posted(stream_, name);
}

Pipe::Io FabricPipe::put(std::span<const iovec> pieces, std::uint64_t name, GpuMemory* gpu) {
  if (open() && !is_up()) advance();
  return sent(is_linked_ ? mux().put(stream_, pieces, name, gpu) : 0);
}

Pipe::Io FabricPipe::sent(std::size_t bytes) {
  if (bytes > 0) return {.bytes = bytes};
  if (++quiet_calls_ >= kQuietCalls) check_connection();
  return is_over() ? closed() : Io{};
}

Pipe::Io FabricPipe::receive_into_gpu(std::span<std::byte> gpu, std::span<const iovec> pieces) {
  is_listed_ = false;
  if (stream_ != nullptr) {
    auto left = gpu;
    const std::size_t bytes = mux().receive(stream_, left, pieces);
    if (bytes > 0) {
      // The peer runs. A receive from any rank reads on until there is nothing, and must not make a connection again
      // that both ends closed since it was idle.
      quiet_calls_ = 0;
      return {.bytes = bytes, .in_gpu = gpu.size() - left.size()};
    }
  }
  if (!is_up()) {
    advance();
  } else if (++quiet_calls_ >= kQuietCalls) {
    check_connection();
  }
  if (!last_.empty()) {
    const std::size_t copied = IovecCursor(pieces).copy_from(last_.data(), last_.size());
    last_.erase(last_.begin(), last_.begin() + static_cast<std::ptrdiff_t>(copied));
    return {.bytes = copied};
  }
  if (!is_over()) return {};
  const std::uint32_t read = stream_ == nullptr ? 0 : mux().read(stream_);
  const bool is_all = final_counts_ && read == final_counts_->segments;
  if (is_all || now_ns() - over_since_ns_ > kLastNs) return closed();
  end();  // list it again
  return {};
}

bool FabricPipe::has_unsent() {
  return is_linked_ && !is_up() && !is_over() && mux().final_counts(stream_).segments > 0;
}

bool FabricPipe::cancel() {
  if (stream_ == nullptr) return true;
  check_connection();
  if (final_counts_) mux().confirm_cancel(stream_, final_counts_->writes);
  const bool is_done = mux().cancel(stream_);
  if (!mux().is_open()) send_final_counts(final_counts());
  return is_done;
}

void FabricPipe::force_close() {
  if (stream_ == nullptr) return;
  mux().force_close("a peer or the provider could still use memory of an operation that failed");
  send_final_counts(final_counts());
}

bool FabricPipe::hung_up() {
  check_connection();
  return is_over();
}

// --- Waiting ---------------------------------------------------------------------------------------------------------

void FabricPipe::wait_for(short events, std::vector<pollfd>& fds) const {
  quiet_calls_ = kQuietCalls;
  if (stream_ != nullptr) mux().wait_for(stream_, events, fds);
  if (over_since_ns_ >= 0) {
    mux().wake_after(fds, StreamMux::kPollIntervalNs);  // until kLastNs is over
  } else {
    connection_->wait_for(static_cast<short>(POLLIN | POLLRDHUP | (outbox_.empty() ? 0 : POLLOUT)), fds);
  }
}

bool FabricPipe::flush() {
  bool is_done = connection_->flush();
  if (awaits_connection()) {
    const bool checks = stream_ != nullptr || ++quiet_calls_ >= kQuietCalls;
    if (checks && has_live_connection()) advance();
    // Nothing can be done while the connection waits for a socket.
    is_done &= !awaits_connection() || !has_live_connection();
  }
  return (stream_ == nullptr || mux().settled(stream_) || is_over()) && is_done;
}

void FabricPipe::wait_to_flush(std::vector<pollfd>& fds) {
  connection_->wait_to_flush(fds);
  if (awaits_connection()) {
    quiet_calls_ = kQuietCalls;
    connection_->wait_for(static_cast<short>(POLLIN | POLLRDHUP | (outbox_.empty() ? 0 : POLLOUT)), fds);
    if (is_linked_) mux().wake_after(fds, Sender::kProbeIntervalNs);
    if (stream_ != nullptr) mux().wait_for(stream_, 0, fds);
  } else if (stream_ != nullptr && !mux().settled(stream_)) {
    mux().wait_for(stream_, 0, fds);
  }
}

// --- The pipes of a mesh ---------------------------------------------------------------------------------------------

void FabricPipeMaker::take_readable(std::vector<int>& peers) {
  peers.insert(peers.end(), lane_->over.begin(), lane_->over.end());
  lane_->over.clear();
  lane_->mux->take_readable(*lane_->readable, peers);
}

void FabricPipeMaker::wait_for_readable(std::vector<pollfd>& fds) {
  lane_->mux->wait_for_readable(*lane_->doorbell, *lane_->readable, fds);
  if (!lane_->over.empty()) lane_->mux->wake_after(fds, StreamMux::kPollIntervalNs);
}

}  // namespace netfold::transport::fabric
