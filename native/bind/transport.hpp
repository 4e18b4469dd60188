#pragma once

#include <netfold/transport/fabric/fabric_datagrams.hpp>
#include <netfold/transport/udp/udp_socket.hpp>

#include <memory>

// A port for packets and the switch at its other end, until a group takes it over.
struct DataPort {
  std::unique_ptr<netfold::transport::Datagrams> port;
  netfold::transport::Datagrams::Peer to = netfold::transport::Datagrams::kUnknownPeer;

  // Once. Throws nb::value_error.
  std::unique_ptr<netfold::transport::Datagrams> take();
};

struct UdpPort : DataPort {
  netfold::transport::UdpSocket* socket = nullptr;
};

struct FabricPort : DataPort {
  netfold::transport::fabric::FabricDatagrams* endpoint = nullptr;
};
