// The functions that the tables of both networks have, and what keeps exceptions in the plugin.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>

#include <netfold/nccl/interface.hpp>
#include "endpoint.hpp"

#define NETFOLD_EXPORTED extern "C" __attribute__((visibility("default"))) const

namespace netfold::nccl {

inline constexpr std::size_t kMaxMessage = std::size_t{1} << 30;
// Staged messages are copied whole, so that NCCL is to cut them.
inline constexpr std::size_t kMaxStaged = 4 << 20;
inline constexpr int kMaxComms = 65'536;

template <class Work>
Result guarded(Work work) {
  try {
    return work();
  } catch (const std::invalid_argument& error) {
    warn(error.what());
    return Result::invalid_usage;
  } catch (const device::CudaError& error) {
    warn(error.what());
    return Result::unhandled_cuda_error;
  } catch (const std::system_error& error) {
    warn(error.what());
    return Result::system_error;
  } catch (const std::exception& error) {
    warn(error.what());
    return Result::remote_error;
  }
}

// --- devices ---------------------------------------------------------------------------------------------------------

// The fields that all versions have.
template <class Properties>
Result common_properties(int number, Properties& properties) {
  return guarded([&] {
    const auto& all = Endpoint::instance().devices();
    if (number < 0 || static_cast<std::size_t>(number) >= all.size()) {
      throw std::invalid_argument("there is no device " + std::to_string(number));
    }
    const Device& device = all[static_cast<std::size_t>(number)];
    properties = {};
    // NCCL only reads them, and they live as long as the process.
    properties.name = const_cast<char*>(device.name.c_str());
    properties.pci_path = device.pci_path.empty() ? nullptr : const_cast<char*>(device.pci_path.c_str());
    properties.guid = static_cast<std::uint64_t>(number);
    properties.pointers = kHostPointer;
    properties.speed = device.speed;
    properties.max_comms = kMaxComms;
    properties.max_receives = kMaxReceives;
    return Result::success;
  });
}

inline Result properties_v8(int number, PropertiesV8* properties) { return common_properties(number, *properties); }

template <class Properties>
Result properties_v9(int number, Properties* properties) {
  const Result result = common_properties(number, *properties);
  if (result != Result::success) return result;
  properties->of.count = 1;
  properties->of.devices[0] = number;
  properties->max_message = kMaxMessage;
  properties->max_collective = kMaxMessage;
  return result;
}

inline Result properties_v11(int number, PropertiesV11* properties) {
  const Result result = properties_v9(number, properties);
  if (result == Result::success) properties->max_multi_request = 1;
  return result;
}

inline Result properties_v12(int number, PropertiesV12* properties) {
  const Result result = properties_v9(number, properties);
  if (result != Result::success) return result;
  properties->max_multi_request = 1;
  properties->rail = properties->plane = kUndefined;
  return result;
}

// --- memory ----------------------------------------------------------------------------------------------------------

inline Result gpu_was_not_offered() {
  warn("memory of a GPU was given, and only memory of the host was offered");
  return Result::invalid_usage;
}

inline Result register_dmabuf(void*, void*, std::size_t, int, std::uint64_t, int, void** registration) {
  *registration = nullptr;
  warn("a dmabuf was given, and only memory of the host was offered");
  return Result::invalid_usage;
}

}  // namespace netfold::nccl
