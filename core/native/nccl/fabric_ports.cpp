#include "fabric_ports.hpp"

#include <arpa/inet.h>
#include <netfold/transport/fabric/strict_endpoint.hpp>

#include <algorithm>

namespace netfold::nccl {
namespace {

namespace fabric = transport::fabric;

std::string host_of(const transport::Address& address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.storage.ss_family, address.host().data(), text, sizeof text);
  return text;
}

}  // namespace

FabricPorts::FabricPorts(const Settings& settings, const std::vector<Device>& devices, fabric::Gpus gpus)
    : settings_(settings), devices_(devices), gpus_(gpus) {
  for (std::size_t i = 0; i < devices.size(); ++i) ports_.push_back(open(i));
}

FabricPort FabricPorts::open(std::size_t device) const {
  const Device& at = devices_[device];
  try {
    std::vector<std::unique_ptr<fabric::Endpoint>> rails;
    rails.push_back(
        fabric::open_named_endpoint(settings_.fabric, host_of(at.address), static_cast<int>(device), gpus_));
    auto port = std::make_shared<fabric::StreamMux>(std::move(rails));
    port->set({.rma_min_bytes = settings_.rma_min_bytes, .registrations = settings_.registrations});
    return port;
  } catch (const fabric::Error& error) {
    throw fabric::Error("NETFOLD_TRANSPORT=fabric:" + settings_.fabric + " on " + at.name + ": " + error.what());
  }
}

FabricPort FabricPorts::of(int device) {
  const std::lock_guard lock(mutex_);
  FabricPort& port = ports_.at(static_cast<std::size_t>(device));
  if (!port->is_open()) port = open(static_cast<std::size_t>(device));
  return port;
}

std::string FabricPorts::description() const {
  const std::lock_guard lock(mutex_);
  std::string domains;
  for (const FabricPort& port : ports_) domains += (domains.empty() ? "" : ", ") + port->limits().domain;
  return ports_.front()->limits().provider + " " + ports_.front()->limits().version + " on " + domains;
}

std::size_t rma_min_bytes_of(std::size_t own, std::size_t theirs) {
  return std::min(own, theirs) == 0 ? 0 : std::max(own, theirs);
}

}  // namespace netfold::nccl
