// The network interfaces that NCCL sees as devices.
#pragma once

#include <netfold/transport/socket.hpp>

#include <string>
#include <vector>

namespace netfold::nccl {

struct Device {
  std::string name;
  std::string pci_path;  // empty: it is no PCI device
  int speed = 0;         // Mbit/s
  transport::Address address;
};

// The interfaces of these names, in this order. No names: those that are up and have an address, without loopback,
// Docker's and libvirt's bridges; loopback where there is no other. Throws std::invalid_argument for a name that is not
// here or has no address, std::system_error.
std::vector<Device> find_devices(const std::vector<std::string>& names);

}  // namespace netfold::nccl
