// A pipe over one connection, or several over different networks: its rails.
//
// Byte b of the stream goes over rail (b / kStripeBytes) mod K: both ends know this, so nothing is said about it on the
// wire, and a rail by itself is a stream that can be mended (resumable_socket.hpp). It suits networks that are alike; with others
// all go at the pace of the slowest.
#pragma once

#include <netfold/transport/tcp/resumable_socket.hpp>

#include <functional>

namespace netfold::transport {

class TcpPipe final : public Pipe {
 public:
  static constexpr std::size_t kStripeBytes = 64 << 10;

  // Connections that are made and authenticated above this layer. `on_broken` is told of a rail that broke and waits to
  // be mended; without it nothing is kept for that, and a connection that ends is the end. `secrets`: by socket; none
  // for plain bytes.
  TcpPipe(std::vector<Fd> sockets, const std::vector<auth::StreamSecrets>& secrets,
          std::function<void(int rail)> on_broken);

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() override;
  std::size_t unconfirmed() const override;
  bool flush() override;
  void wait_to_flush(std::vector<pollfd>& fds) override;
  // A record that a socket took in part: the rest is written by `flush`.
  bool needs_progress() const override { return has_records_; }
  bool has_unsent() const override;

  int rails() const override { return static_cast<int>(rails_.size()); }
  ResumableSocket* rail(int number) override { return &rails_[static_cast<std::size_t>(number)]; }

 private:
  std::size_t rail_at(std::uint64_t position) const { return position / kStripeBytes % rails_.size(); }
  void report_broken(std::size_t rail);
  template <class Move>
  Io by_stripes(std::span<const iovec> pieces, std::uint64_t& position, Move move);

  std::vector<ResumableSocket> rails_;
  std::vector<int> reported_;  // after how many mends a break was told
  std::function<void(int)> on_broken_;
  const bool has_records_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace netfold::transport
