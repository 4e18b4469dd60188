#pragma once

#include <netfold/transport/udp.hpp>

#include <memory>

struct UdpPort {
  std::unique_ptr<netfold::transport::UdpSocket> socket;
};
