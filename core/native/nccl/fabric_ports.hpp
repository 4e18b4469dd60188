// This process's ports on a fabric, one for each device, where NETFOLD_TRANSPORT names a provider of libfabric.
#pragma once

#include <netfold/transport/fabric/fabric_pipe.hpp>
#include <netfold/transport/fabric/libfabric.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices.hpp"
#include "settings.hpp"

namespace netfold::nccl {

using FabricPort = std::shared_ptr<transport::fabric::StreamMux>;

class FabricPorts {
 public:
  // Opens a port on each device. Throws transport::fabric::Error that names the provider and the device.
  // gpus: the ports are asked for memory of GPUs.
  FabricPorts(const Settings& settings, const std::vector<Device>& devices, transport::fabric::Gpus gpus);

  // The port of a device. One whose endpoint had to be closed serves only its remaining streams; then a new one is
  // opened. Throws as the constructor.
  FabricPort of(int device);
  // "tcp 117.0 on lo".
  std::string description() const;

 private:
  FabricPort open(std::size_t device) const;

  const Settings& settings_;
  const std::vector<Device>& devices_;
  const transport::fabric::Gpus gpus_;
  mutable std::mutex mutex_;
  std::vector<FabricPort> ports_;
};

// The shortest part that goes by RMA between two ports; 0: none does.
std::size_t rma_min_bytes_of(std::size_t own, std::size_t theirs);

}  // namespace netfold::nccl
