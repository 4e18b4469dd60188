// A pipe over one TCP connection, or over several connections on different networks: the pipe's rails.
//
// Byte b of the stream goes over rail (b / kStripeBytes) mod K. Both ends know this rule, so no header names the rail,
// and each rail is a stream that can reconnect by itself (resumable_socket.hpp). Striping suits equal networks: with
// unequal ones, all rails run at the pace of the slowest.
#pragma once

#include <netfold/transport/tcp/resumable_socket.hpp>

#include <functional>

namespace netfold::transport {

class TcpPipe final : public Pipe {
 public:
  static constexpr std::size_t kStripeBytes = 64 << 10;

  // sockets: connections that the layer above made and authenticated, one a rail; takes ownership. Empty: the rail is
  // connected once it is used.
  // secrets: by rail; with `security` alone where the rail is not connected.
  // on_broken: called for a rail that waits for a socket: its first one where `is_first`, else a new one.
  TcpPipe(std::vector<Fd> sockets, const std::vector<auth::StreamSecrets>& secrets, bool resumable,
          std::function<void(int rail, bool is_first)> on_broken);

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override;
  std::size_t unconfirmed() const override;
  bool flush() override;
  void wait_to_flush(std::vector<pollfd>& fds) override;
  bool has_unsent() override;
  bool was_connected() const override;
  bool shows_bytes() const override { return true; }

  int rails() const override { return static_cast<int>(rails_.size()); }
  ResumableSocket* rail(int number) override { return &rails_[static_cast<std::size_t>(number)]; }

 private:
  static constexpr int kNone = -2;

  std::size_t rail_at(std::uint64_t position) const { return position / kStripeBytes % rails_.size(); }
  void report_broken(std::size_t rail);
  template <class Move>
  Io by_stripes(std::span<const iovec> pieces, std::uint64_t& position, Move move);

  std::vector<ResumableSocket> rails_;
  std::vector<int> reported_;  // by rail: the value of reconnects() at the last report of a break; kNone: none
  std::function<void(int, bool)> on_broken_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace netfold::transport
