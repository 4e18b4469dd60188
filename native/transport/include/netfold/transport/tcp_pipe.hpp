// A pipe over a connected stream socket.
#pragma once

#include <netfold/transport/pipe.hpp>
#include <netfold/transport/socket.hpp>

namespace netfold::transport {

class TcpPipe final : public Pipe {
 public:
  // Takes ownership. The connection is made and authenticated above this floor.
  explicit TcpPipe(Fd socket);

  Io send(std::span<const iovec> pieces) override;
  Io receive(std::span<const iovec> pieces) override;
  void wait_for(short events, std::vector<pollfd>& fds) const override;
  bool hung_up() const override;
  std::size_t unconfirmed() const override;

 private:
  Fd socket_;
};

}  // namespace netfold::transport
