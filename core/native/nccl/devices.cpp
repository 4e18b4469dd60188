#include "devices.hpp"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>

namespace netfold::nccl {
namespace {

constexpr int kUnknownSpeed = 10'000;  // as NCCL assumes

bool is_of_containers(const std::string& name) { return name.starts_with("docker") || name.starts_with("virbr"); }

Device device_of(const ifaddrs& interface) {
  Device device{.name = interface.ifa_name, .pci_path = {}, .speed = kUnknownSpeed, .address = {}};
  const std::string folder = "/sys/class/net/" + device.name;
  int speed = 0;
  if (std::ifstream(folder + "/speed") >> speed && speed > 0) device.speed = speed;
  const std::unique_ptr<char, void (*)(void*)> path(realpath((folder + "/device").c_str(), nullptr), std::free);
  if (path != nullptr) device.pci_path = path.get();
  device.address.length = interface.ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&device.address.storage, interface.ifa_addr, device.address.length);
  return device;
}

bool is_usable(const ifaddrs& interface) {
  if ((interface.ifa_flags & IFF_UP) == 0 || interface.ifa_addr == nullptr) return false;
  if (interface.ifa_addr->sa_family == AF_INET) return true;
  if (interface.ifa_addr->sa_family != AF_INET6) return false;
  return !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(interface.ifa_addr)->sin6_addr);
}

}  // namespace

std::vector<Device> find_devices(const std::vector<std::string>& names) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) transport::throw_errno("list the network interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<Device> found, loopback;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* each = list; each != nullptr; each = each->ifa_next) {
      if (!is_usable(*each) || each->ifa_addr->sa_family != family) continue;
      auto& to = (each->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : found;
      const auto is_known = [&](const Device& device) { return device.name == each->ifa_name; };
      if (std::ranges::none_of(to, is_known)) to.push_back(device_of(*each));
    }
  }
  if (names.empty()) {
    std::erase_if(found, [](const Device& device) { return is_of_containers(device.name); });
    return found.empty() ? loopback : found;
  }
  found.insert(found.end(), loopback.begin(), loopback.end());
  std::vector<Device> chosen;
  for (const auto& name : names) {
    const auto device = std::ranges::find(found, name, &Device::name);
    if (device == found.end()) {
      throw std::invalid_argument("NETFOLD_INTERFACE names " + name +
                                  ", which this host does not have, or which is down or has no address");
    }
    chosen.push_back(*device);
  }
  return chosen;
}

}  // namespace netfold::nccl
