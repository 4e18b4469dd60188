#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <netfold/transport/process_wide.hpp>
#include <netfold/transport/tcp/resumable_socket.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <mutex>

namespace netfold::transport {
namespace {

// How many bytes a socket holds beyond those in flight: enough to bridge, several times over at 1 Gbit/s, the
// millisecond until the sender of a busy host runs again. With more, a sender would count one peer as served and start
// on the next, megabytes too early.
constexpr int kUnsentBytes = 512 << 10;

// The kernel asks the peer's host where nothing has come for so long, and ends the socket when it does not answer.
constexpr int kKeepaliveIdleS = 5, kKeepaliveIntervalS = 2, kKeepaliveProbes = 5;
static_assert((kKeepaliveIdleS + kKeepaliveProbes * kKeepaliveIntervalS) * 1'000'000'000LL ==
              ResumableSocket::kSilentNs);

// Free blocks of all retransmit buffers of the process. Malloc would pass such memory back and forth with the kernel,
// which costs more than the copy. The block that was given back last is taken next, since it is in the cache.
struct SpareBlocks {
  static constexpr std::size_t kMost = 128;
  std::mutex mutex;
  std::vector<std::unique_ptr<std::byte[]>> blocks;

  std::unique_ptr<std::byte[]> take(std::size_t bytes) {
    std::lock_guard lock(mutex);
    if (blocks.empty()) return std::make_unique_for_overwrite<std::byte[]>(bytes);
    auto block = std::move(blocks.back());
    blocks.pop_back();
    return block;
  }
  void give(std::unique_ptr<std::byte[]> block) {
    std::lock_guard lock(mutex);
    if (blocks.size() < kMost) blocks.push_back(std::move(block));
  }
};

// A plain call costs the kernel less than a message, whose pieces it takes apart. So one piece goes by a plain call, and
// a few bytes go as one piece.
ssize_t send_pieces(int fd, std::span<const iovec> pieces) {
  constexpr std::size_t kFewBytes = 256;
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  if (pieces.size() == 1) return ::send(fd, pieces[0].iov_base, total, kFlags);
  if (total <= kFewBytes) {
    std::array<std::byte, kFewBytes> all;
    IovecCursor(pieces).copy_to(all.data(), total);
    return ::send(fd, all.data(), total, kFlags);
  }
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  return ::sendmsg(fd, &message, kFlags);
}

ssize_t receive_pieces(int fd, std::span<const iovec> pieces) {
  if (pieces.size() == 1) return ::recv(fd, pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  return ::recvmsg(fd, &message, MSG_DONTWAIT);
}

SpareBlocks& spare_blocks() { return process_wide<SpareBlocks, &SpareBlocks::mutex>(); }

[[maybe_unused]] const auto& made_at_load = spare_blocks();

}  // namespace

ResumableSocket::ResumableSocket(Fd socket, bool resumable, const auth::StreamSecrets& secrets)
    : resumable_(resumable), security_(secrets.security) {
  if (socket) {
    adopt(std::move(socket), secrets);
  } else {
    state_ = State::broken;
    reconnects_ = -1;
  }
}

void ResumableSocket::adopt(Fd socket, const auth::StreamSecrets& secrets) {
  records_ = security_ == auth::Security::none ? nullptr : std::make_unique<RecordStream>(secrets);
  socket_ = ProcessFd(std::move(socket));
  const int fd = socket_.get();
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("set non-blocking");
  used_ns_ = now_ns();
  is_released_ = false;
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepaliveIdleS, sizeof kKeepaliveIdleS);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepaliveIntervalS, sizeof kKeepaliveIntervalS);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kKeepaliveProbes, sizeof kKeepaliveProbes);
}

Pipe::Io ResumableSocket::send(std::span<const iovec> pieces) {
  if (state_ == State::lost) return lost();
  if (state_ != State::up || (!resumable_ && !accepted()) || !flush()) return {};
  if (records_ != nullptr) return send_records(pieces);
  const ssize_t sent = send_pieces(socket_.get(), pieces);
  if (sent < 0) return is_temporary(errno) ? Pipe::Io{} : handle_error(errno);
  if (resumable_) buffer_for_retransmit(IovecCursor(pieces), static_cast<std::size_t>(sent));
  sent_ += static_cast<std::uint64_t>(sent);
  written_ = sent_;
  used_ns_ = now_ns();
  return {.bytes = static_cast<std::size_t>(sent)};
}

// Precondition: no record is pending.
Pipe::Io ResumableSocket::send_records(std::span<const iovec> pieces) {
  IovecCursor payload(pieces);
  std::size_t taken = 0;
  int error = 0;
  while (!payload.at_end() && state_ == State::up && records_->flush(socket_.get(), error)) {
    const IovecCursor start = payload;
    const std::size_t bytes = records_->take(payload);
    if (resumable_) {
      records_->note_record_end(sent_ + bytes);
      buffer_for_retransmit(start, bytes);  // may find that the socket broke
    }
    taken += bytes;
    used_ns_ = now_ns();
    sent_ += bytes;
    written_ = sent_;
  }
  if (error == 0 && state_ == State::up) records_->flush(socket_.get(), error);
  if (error != 0) {
    const Pipe::Io io = handle_error(error);
    if (taken == 0 || !resumable_) return io;
  }
  return {.bytes = taken};
}

Pipe::Io ResumableSocket::receive(std::span<const iovec> pieces) {
  if (unread_from_ < unread_.size()) {
    const std::size_t copied =
        IovecCursor(pieces).copy_from(unread_.data() + unread_from_, unread_.size() - unread_from_);
    unread_from_ += copied;
    return {.bytes = copied};
  }
  if (state_ == State::lost) return lost();
  if (state_ == State::broken || !accepted()) return {};
  const auto result = read_socket(pieces);
  received_ += result.bytes;
  if (result.bytes > 0) used_ns_ = now_ns();
  return result.end == RecordStream::End::none ? Pipe::Io{.bytes = result.bytes} : handle_end(result);
}

// Reads the greeting where it is still due, then bytes into `buffers`.
RecordStream::ReadResult ResumableSocket::read_socket(std::span<const iovec> buffers) {
  if (records_ != nullptr) return records_->receive(socket_.get(), buffers, accepted_);
  const auto read = [this](std::span<const iovec> into) -> RecordStream::ReadResult {
    const ssize_t bytes = receive_pieces(socket_.get(), into);
    if (bytes > 0) return {.bytes = static_cast<std::size_t>(bytes)};
    if (bytes == 0) return {.end = RecordStream::End::closed};
    if (is_temporary(errno)) return {};
    return {.end = RecordStream::End::failed, .error = errno};
  };
  if (!accepted_) {
    std::byte greeting{};
    const iovec into{&greeting, 1};
    const auto result = read({&into, 1});
    accepted_ = result.bytes == 1;
    if (!accepted_) return result;
  }
  return buffers.empty() ? RecordStream::ReadResult{} : read(buffers);
}

bool ResumableSocket::accepted() {
  if (accepted_) return true;
  const auto result = read_socket({});
  if (result.end != RecordStream::End::none) handle_end(result);
  return accepted_ && state_ == State::up;
}

Pipe::Io ResumableSocket::handle_end(const RecordStream::ReadResult& result) {
  if (result.end != RecordStream::End::forged) return handle_error(result.error);
  state_ = State::lost;
  error_ = 0;
  why_ = std::string(
             "a record came with a wrong tag: bytes were changed, repeated or left out between the two hosts, and none "
             "of them was used (NETFOLD_SECURITY=") +
         (security_ == auth::Security::encrypt ? "encrypt)" : "authenticate)");
  retransmit_buffer_.clear();
  socket_.reset();
  return lost();
}

// A connection that is not resumable keeps its socket: the peer's last bytes may still be unread.
Pipe::Io ResumableSocket::handle_error(int error) {
  error_ = error;
  // Without a greeting the peer has not taken this socket over, and will be asked for another.
  if (!resumable_ && accepted_) return lost();
  disconnect();
  return {};
}

// All steps of disconnecting at once, after an end of stream or a reset. The peer keeps no copy of bytes that our
// kernel has confirmed. So all of them are read before the socket is closed, up to the end of stream, behind which
// nothing can come.
void ResumableSocket::disconnect() {
  begin_disconnect();
  if (state_ != State::disconnecting) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kLastNs);
  while (!drain()) {
    // Reached only where the kernel refused to send over a connection that still works.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd more{socket_.get(), POLLIN, 0};
    if (left.count() <= 0 || ::poll(&more, 1, static_cast<int>(left.count())) == 0) break;
  }
  end_disconnect();
}

void ResumableSocket::begin_disconnect() {
  if (state_ != State::up) return;
  state_ = State::disconnecting;
  ::shutdown(socket_.get(), SHUT_WR);
}

void ResumableSocket::end_disconnect() {
  if (state_ != State::disconnecting) return;
  drain();
  // A record with a wrong tag has ended the connection for good.
  if (state_ != State::disconnecting) return;
  state_ = State::broken;
  if (resumable_) release_confirmed();
  socket_.reset();
  records_.reset();
}

bool ResumableSocket::drain() {
  unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(unread_from_));
  unread_from_ = 0;
  for (;;) {
    const std::size_t before = unread_.size();
    unread_.resize(before + kBlockBytes);
    const iovec space{unread_.data() + before, kBlockBytes};
    const auto result = read_socket({&space, 1});
    unread_.resize(before + result.bytes);
    received_ += result.bytes;
    if (result.end == RecordStream::End::forged) handle_end(result);
    if (result.bytes == 0) return result.end != RecordStream::End::none;
  }
}

Fd ResumableSocket::duplicate_socket() const {
  Fd copy(fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno("watch a connection");
  return copy;
}

bool ResumableSocket::reconnect(Fd socket, std::uint64_t peer_received, const auth::StreamSecrets& secrets) {
  if (state_ != State::broken) return false;
  if (secrets.security != security_) {
    give_up("the new connection is not as secure as the one that broke");
    return false;
  }
  if (peer_received < buffered_from_ || peer_received > sent_) {
    give_up("the peer has received " + std::to_string(peer_received) + " of " + std::to_string(sent_) +
            " bytes, and those before " + std::to_string(buffered_from_) + " are not kept any more");
    return false;
  }
  adopt(std::move(socket), secrets);
  written_ = peer_received;
  state_ = State::up;
  error_ = 0;
  ++reconnects_;
  accepted_ = false;
  if (records_ != nullptr) {
    IovecCursor nothing{std::span<const iovec>{}};
    records_->take(nothing);
  } else {
    const std::byte greeting{1};
    if (::send(socket_.get(), &greeting, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
      handle_error(errno);
      return true;
    }
  }
  flush();
  return true;
}

void ResumableSocket::give_up(std::string why, bool is_orderly) {
  disconnect();
  state_ = State::lost;
  is_orderly_ = is_orderly;
  why_ = std::move(why);
  retransmit_buffer_.clear();
}

bool ResumableSocket::flush() {
  if (state_ != State::up) return true;
  if (records_ != nullptr) {
    int error = 0;
    while (records_->flush(socket_.get(), error) && written_ < sent_) {
      const iovec lost_bytes = buffered_at(written_);
      IovecCursor payload({&lost_bytes, 1});
      written_ += records_->take(payload);
      records_->note_record_end(written_);
    }
    if (error != 0) handle_error(error);
    return error == 0 && !records_->has_pending();
  }
  while (written_ < sent_) {
    const iovec lost_bytes = buffered_at(written_);
    const ssize_t sent = ::send(socket_.get(), lost_bytes.iov_base, lost_bytes.iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && !is_temporary(errno)) handle_error(errno);
    if (sent <= 0) return false;
    written_ += static_cast<std::uint64_t>(sent);
  }
  return true;
}

// The buffered bytes from `position` on, to the end of their block.
iovec ResumableSocket::buffered_at(std::uint64_t position) const {
  const auto offset = static_cast<std::size_t>(position - buffered_from_);
  return {retransmit_buffer_[offset / kBlockBytes].get() + offset % kBlockBytes,
          std::min(kBlockBytes - offset % kBlockBytes, static_cast<std::size_t>(sent_ - position))};
}

// Copies the next `count` of `bytes`. To be called before sent_ counts them.
void ResumableSocket::buffer_for_retransmit(IovecCursor bytes, std::size_t count) {
  auto at = static_cast<std::size_t>(sent_ - buffered_from_);
  for (const std::size_t end = at + count; at < end;) {
    if (at == retransmit_buffer_.size() * kBlockBytes) retransmit_buffer_.push_back(spare_blocks().take(kBlockBytes));
    const std::size_t space = std::min(end - at, kBlockBytes - at % kBlockBytes);
    at += bytes.copy_to(retransmit_buffer_[at / kBlockBytes].get() + at % kBlockBytes, space);
  }
  if (retransmit_buffer_.size() > 4) release_confirmed();
}

// Frees whole blocks that the peer's kernel has confirmed. The kernel still knows this count after the socket broke.
void ResumableSocket::release_confirmed() {
  int unconfirmed = 0;
  if (state_ == State::up) accepted();
  if (!socket_ || !accepted_ || ::ioctl(socket_.get(), SIOCOUTQ, &unconfirmed) != 0) return;
  const std::uint64_t confirmed =
      records_ != nullptr ? records_->confirmed(static_cast<std::size_t>(unconfirmed), buffered_from_)
                          : written_ - std::min<std::uint64_t>(written_, static_cast<std::uint64_t>(unconfirmed));
  while (!retransmit_buffer_.empty() && buffered_from_ + kBlockBytes <= confirmed) {
    spare_blocks().give(std::move(retransmit_buffer_.front()));
    retransmit_buffer_.pop_front();
    buffered_from_ += kBlockBytes;
  }
}

void ResumableSocket::wait_for(short events, std::vector<pollfd>& fds) const {
  // A socket that is shut for writing is always ready for writing.
  if (state_ == State::disconnecting) events &= ~POLLOUT;
  if (!socket_ || events == 0) return;
  if (!resumable_ && !accepted_) events = static_cast<short>((events & ~POLLOUT) | POLLIN);  // the greeting
  // The socket does not wake a reader of bytes that were read ahead.
  const bool is_ready = (events & POLLIN) != 0 && records_ != nullptr && records_->has_payload();
  fds.push_back(is_ready ? pollfd{always_readable(), POLLIN, 0} : pollfd{socket_.get(), events, 0});
}

bool ResumableSocket::hung_up() {
  if (state_ == State::up) accepted();  // else an unread greeting ends every sleep
  if (state_ == State::up) {
    pollfd look{socket_.get(), POLLRDHUP, 0};
    if (::poll(&look, 1, 0) <= 0 || (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) return false;
    if (!resumable_ && accepted_) return true;
    disconnect();
  }
  return state_ == State::lost;
}

std::int64_t ResumableSocket::idle_since_ns() {
  const bool is_idle = resumable_ && state_ == State::up && accepted() && !has_unsent() && unconfirmed() == 0;
  return is_idle && unread_from_ == unread_.size() ? used_ns_ : -1;
}

// TCP_USER_TIMEOUT is no way to this: Linux then also ends a connection whose peer confirms probes, but whose process
// reads nothing for that long.
bool ResumableSocket::is_silent() const {
  constexpr int kLeastRepeats = 2;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (state_ != State::up || ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  const bool repeats = info.tcpi_retransmits >= kLeastRepeats || info.tcpi_probes >= kLeastRepeats;
  return repeats && info.tcpi_last_ack_recv * 1'000'000LL >= kSilentNs;
}

std::size_t ResumableSocket::unconfirmed() const {
  if (!socket_) return static_cast<std::size_t>(state_ == State::lost ? 0 : sent_ - buffered_from_);
  // A connection that was reset still counts bytes that it will never send.
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == TCP_CLOSE) return 0;
  int bytes = 0;
  const std::size_t pending = records_ != nullptr ? records_->pending_bytes() : 0;
  return pending + (::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
}

}  // namespace netfold::transport
