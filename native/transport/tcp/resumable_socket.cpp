#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <netfold/transport/tcp/resumable_socket.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

namespace netfold::transport {
namespace {

// What a socket holds beyond what is on its way: enough to bridge the millisecond until a busy host's sender runs
// again at 1 Gbit/s several times over. More would let a sender believe that it is through with one peer, and start on
// the next, megabytes too early.
constexpr int kUnsentBytes = 512 << 10;

// Blocks that rails keep bytes in, of all the process's: memory that malloc hands back and forth with the kernel costs
// more than the copy. The last one given back is the next one taken: it is in the cache.
class SpareBlocks {
 public:
  std::unique_ptr<std::byte[]> take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    if (blocks_.empty()) return std::make_unique_for_overwrite<std::byte[]>(bytes);
    auto block = std::move(blocks_.back());
    blocks_.pop_back();
    return block;
  }
  void give(std::unique_ptr<std::byte[]> block) {
    std::lock_guard lock(mutex_);
    if (blocks_.size() < kMost) blocks_.push_back(std::move(block));
  }
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr std::size_t kMost = 128;
  std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

SpareBlocks& spare_blocks() {
  // Never destroyed: threads of a dying process may still be inside.
  static auto* blocks = [] {
    // A child must not find the lock held by a thread that it does not have.
    pthread_atfork([] { spare_blocks().lock(); }, [] { spare_blocks().unlock(); }, [] { spare_blocks().unlock(); });
    return new SpareBlocks;
  }();
  return *blocks;
}

// Made when the library is loaded: a child of a fork during the first use would wait for the thread that makes it.
[[maybe_unused]] const auto& made_at_load = spare_blocks();

}  // namespace

ResumableSocket::ResumableSocket(Fd socket, bool resumable, const auth::StreamSecrets& secrets)
    : resumable_(resumable), security_(secrets.security) {
  adopt(std::move(socket), secrets);
}

void ResumableSocket::adopt(Fd socket, const auth::StreamSecrets& secrets) {
  records_ = security_ == auth::Security::none ? nullptr : std::make_unique<RecordStream>(secrets);
  socket_ = ProcessFd(std::move(socket));
  const int fd = socket_.get();
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("set non-blocking");
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

Pipe::Io ResumableSocket::send(std::span<const iovec> pieces) {
  if (state_ == State::lost) return lost();
  if (state_ != State::up || !flush()) return {};
  if (records_ != nullptr) return send_records(pieces);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return errno == EAGAIN || errno == EINTR ? Pipe::Io{} : broke(errno);
  if (resumable_) buffer_for_retransmit(pieces, 0, static_cast<std::size_t>(sent));
  sent_ += static_cast<std::uint64_t>(sent);
  written_ = sent_;
  return {.bytes = static_cast<std::size_t>(sent)};
}

Pipe::Io ResumableSocket::receive(std::span<const iovec> pieces) {
  if (unread_from_ < unread_.size()) {
    std::size_t given = 0;
    for (const iovec& piece : pieces) {
      const std::size_t some = std::min(piece.iov_len, unread_.size() - unread_from_);
      std::memcpy(piece.iov_base, unread_.data() + unread_from_, some);
      unread_from_ += some;
      given += some;
    }
    return {.bytes = given};
  }
  if (state_ == State::lost) return lost();
  if (state_ == State::broken || !accepted()) return {};
  if (records_ != nullptr) return receive_records(pieces);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  if (got == 0) return broke(0);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? Pipe::Io{} : broke(errno);
  received_ += static_cast<std::uint64_t>(got);
  return {.bytes = static_cast<std::size_t>(got)};
}

// Precondition: nothing is pending.
Pipe::Io ResumableSocket::send_records(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  std::size_t taken = 0;
  int error = 0;
  while (taken < total && state_ == State::up && records_->flush(socket_.get(), error)) {
    const std::size_t some = records_->take(pieces, taken);
    if (resumable_) {
      records_->take_ends_at(sent_ + some);
      buffer_for_retransmit(pieces, taken, some);  // may find that the socket broke
    }
    taken += some;
    sent_ += some;
    written_ = sent_;
  }
  if (error == 0 && state_ == State::up) records_->flush(socket_.get(), error);
  if (error != 0) {
    const Pipe::Io io = broke(error);
    if (taken == 0 || !resumable_) return io;
  }
  return {.bytes = taken};
}

Pipe::Io ResumableSocket::receive_records(std::span<const iovec> pieces) {
  const auto got = records_->receive(socket_.get(), pieces, accepted_);
  received_ += got.bytes;
  return got.end == RecordStream::End::none ? Pipe::Io{.bytes = got.bytes} : ended(got);
}

Pipe::Io ResumableSocket::ended(const RecordStream::Got& got) {
  if (got.end != RecordStream::End::forged) return broke(got.error);
  state_ = State::lost;
  error_ = 0;
  why_ = std::string(
             "a record came with a wrong tag: somebody changed, repeated or left out bytes on the way, and none "
             "of them was used (NETFOLD_SECURITY=") +
         (security_ == auth::Security::encrypt ? "encrypt)" : "authenticate)");
  retransmit_buffer_.clear();
  socket_.reset();
  return lost();
}

bool ResumableSocket::accepted() {
  if (accepted_) return true;
  if (records_ != nullptr) {
    const auto got = records_->receive(socket_.get(), {}, accepted_);
    if (got.end != RecordStream::End::none) ended(got);
    return accepted_ && state_ == State::up;
  }
  std::byte greeting{};
  const ssize_t got = ::recv(socket_.get(), &greeting, 1, MSG_DONTWAIT);
  accepted_ = got == 1;
  if (got == 0) broke(0);
  if (got < 0 && errno != EAGAIN && errno != EINTR) broke(errno);
  return accepted_;
}

// A rail that keeps nothing stays as it is: what the peer said last may still be unread.
Pipe::Io ResumableSocket::broke(int error) {
  error_ = error;
  if (!resumable_) return lost();
  disconnect();
  return {};
}

// What our kernel has confirmed the peer does not keep any more, so it must all be read before the socket goes: up to
// the end of stream, behind which nothing can come. After an end of stream or a reset that is there already.
void ResumableSocket::disconnect() {
  begin_disconnect();
  if (state_ != State::disconnecting) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kLastNs);
  while (!drain()) {
    // Only where the kernel refused to send over a connection that lives.
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
  // A record with a wrong tag has ended the rail for good.
  if (state_ != State::disconnecting) return;
  state_ = State::broken;
  if (resumable_) release_confirmed();
  socket_.reset();
  records_.reset();
}

bool ResumableSocket::drain() {
  unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(unread_from_));
  unread_from_ = 0;
  if (records_ != nullptr) return drain_records();
  for (;;) {
    const std::size_t had = unread_.size();
    const std::size_t most = accepted_ ? kBlockBytes : 1;
    unread_.resize(had + most);
    const ssize_t got = ::recv(socket_.get(), unread_.data() + had, most, MSG_DONTWAIT);
    const int error = errno;
    unread_.resize(had + (accepted_ ? static_cast<std::size_t>(std::max<ssize_t>(got, 0)) : 0));
    if (got > 0) {
      if (accepted_) received_ += static_cast<std::uint64_t>(got);
      accepted_ = true;
    } else if (got == 0 || error != EINTR) {
      return got == 0 || error != EAGAIN;
    }
  }
}

Fd ResumableSocket::duplicate_socket() const {
  Fd copy(fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno("watch a connection");
  return copy;
}

// Keeps what came as whole records with right tags.
bool ResumableSocket::drain_records() {
  for (;;) {
    const std::size_t had = unread_.size();
    unread_.resize(had + kBlockBytes);
    const iovec piece{unread_.data() + had, kBlockBytes};
    const auto got = records_->receive(socket_.get(), {&piece, 1}, accepted_);
    unread_.resize(had + got.bytes);
    received_ += got.bytes;
    if (got.end == RecordStream::End::forged) ended(got);
    if (got.bytes == 0) return got.end != RecordStream::End::none;
  }
}

bool ResumableSocket::reconnect(Fd socket, std::uint64_t peer_received, const auth::StreamSecrets& secrets) {
  if (state_ != State::broken) return false;
  if (secrets.security != security_) {
    give_up("the new connection is not as secure as the one that broke");
    return false;
  }
  if (peer_received < buffered_from_ || peer_received > sent_) {
    give_up("the peer has " + std::to_string(peer_received) + " of " + std::to_string(sent_) +
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
    records_->take({}, 0);
    flush();
    return true;
  }
  const std::byte greeting{1};
  if (::send(socket_.get(), &greeting, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
    broke(errno);
    return true;
  }
  flush();
  return true;
}

void ResumableSocket::give_up(std::string why) {
  disconnect();
  state_ = State::lost;
  why_ = std::move(why);
  retransmit_buffer_.clear();
}

bool ResumableSocket::flush() {
  if (state_ != State::up) return true;  // nothing that could be done now
  if (records_ != nullptr) {
    int error = 0;
    while (records_->flush(socket_.get(), error) && written_ < sent_) resend_as_record();
    if (error != 0) broke(error);
    return error == 0 && !records_->has_pending();
  }
  while (written_ < sent_) {
    std::size_t left = 0;
    const std::byte* from = buffered_at(written_, &left);
    const ssize_t sent = ::send(socket_.get(), from, left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) broke(errno);
    if (sent <= 0) return false;
    written_ += static_cast<std::uint64_t>(sent);
  }
  return true;
}

// A record of what a former socket took along.
void ResumableSocket::resend_as_record() {
  std::size_t left = 0;
  const iovec piece{buffered_at(written_, &left), left};
  written_ += records_->take({&piece, 1}, 0);
  records_->take_ends_at(written_);
}

std::byte* ResumableSocket::buffered_at(std::uint64_t position, std::size_t* left) {
  const std::size_t offset = static_cast<std::size_t>(position - buffered_from_);
  *left = std::min(kBlockBytes - offset % kBlockBytes, static_cast<std::size_t>(sent_ - position));
  return retransmit_buffer_[offset / kBlockBytes].get() + offset % kBlockBytes;
}

// Before sent_ counts them: `bytes` of the pieces, behind the first `skip`.
void ResumableSocket::buffer_for_retransmit(std::span<const iovec> pieces, std::size_t skip, std::size_t bytes) {
  std::size_t at = static_cast<std::size_t>(sent_ - buffered_from_);
  for (const iovec& piece : pieces) {
    const std::size_t skipped = std::min(piece.iov_len, skip);
    skip -= skipped;
    const auto* from = static_cast<const std::byte*>(piece.iov_base) + skipped;
    std::size_t left = std::min(piece.iov_len - skipped, bytes);
    bytes -= left;
    while (left > 0) {
      if (at == retransmit_buffer_.size() * kBlockBytes) {
        retransmit_buffer_.push_back(spare_blocks().take(kBlockBytes));
      }
      const std::size_t some = std::min(left, kBlockBytes - at % kBlockBytes);
      std::memcpy(retransmit_buffer_[at / kBlockBytes].get() + at % kBlockBytes, from, some);
      from += some;
      at += some;
      left -= some;
    }
  }
  if (retransmit_buffer_.size() > 4) release_confirmed();
}

// Whole blocks that the peer's kernel has confirmed: of a socket that broke too, this count stays what it was.
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
  // A socket that is shut for writing is always ready for it.
  if (state_ == State::disconnecting) events &= ~POLLOUT;
  if (!socket_ || events == 0) return;
  // Bytes that were read ahead wake nobody by the socket.
  if ((events & POLLIN) != 0 && records_ != nullptr && records_->has_payload()) {
    fds.push_back({RecordStream::always_readable(), POLLIN, 0});
    return;
  }
  fds.push_back({socket_.get(), events, 0});
}

bool ResumableSocket::hung_up() {
  if (state_ == State::up) {
    pollfd look{socket_.get(), POLLRDHUP, 0};
    if (::poll(&look, 1, 0) <= 0 || (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) return false;
    if (!resumable_) return true;
    disconnect();
  }
  return state_ == State::lost;
}

std::size_t ResumableSocket::unconfirmed() const {
  if (!socket_) return static_cast<std::size_t>(state_ == State::lost ? 0 : sent_ - buffered_from_);
  // A connection that was reset still counts what it will never send.
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == TCP_CLOSE) return 0;
  int bytes = 0;
  const std::size_t pending = records_ != nullptr ? records_->pending_bytes() : 0;
  return pending + (::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
}

}  // namespace netfold::transport
