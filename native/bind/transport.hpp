#pragma once

#include <netfold/transport/fabric/fabric_datagrams.hpp>
#include <netfold/transport/fabric/fabric_pipe.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <memory>

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

// This rank's end of a stream to another rank, until a group takes the pipe.
struct FabricStream {
  std::unique_ptr<netfold::transport::fabric::FabricPipe> pipe;
};
