#pragma once

#include <netfold/transport/fabric/fabric_datagrams.hpp>
#include <netfold/transport/fabric/fabric_pipe.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <memory>
#include <utility>

// A port for packets to and from a switch, until a group or a job takes it.
struct DataPort {
  std::unique_ptr<netfold::transport::Datagrams> port;
  netfold::transport::Datagrams::Peer to = netfold::transport::Datagrams::kUnknownPeer;

  // All throw nb::value_error after `take`; `connected` and `take` also before the port is connected.
  netfold::transport::Datagrams& open() const;
  netfold::transport::Datagrams& connected() const;
  std::unique_ptr<netfold::transport::Datagrams> take();
};

struct UdpPort : DataPort {
  netfold::transport::UdpSocket* socket = nullptr;
};

struct FabricPort : DataPort {
  netfold::transport::fabric::FabricDatagrams* endpoint = nullptr;
};

// This rank's end of a stream to another rank, outside of groups.
struct FabricStream {
  std::shared_ptr<netfold::transport::fabric::StreamMux> mux;
  netfold::transport::fabric::Stream* stream = nullptr;  // null: closed

  FabricStream(std::shared_ptr<netfold::transport::fabric::StreamMux> of, netfold::transport::fabric::Stream* opened)
      : mux(std::move(of)), stream(opened) {}
  FabricStream(FabricStream&& other) noexcept
      : mux(std::move(other.mux)), stream(std::exchange(other.stream, nullptr)) {}
  FabricStream& operator=(FabricStream&&) = delete;
  ~FabricStream() { close(); }
  void close() {
    if (stream != nullptr) mux->close(std::exchange(stream, nullptr));
  }
};
