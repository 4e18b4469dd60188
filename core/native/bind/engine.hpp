// Conversions and checks that the bindings of engine, group and switch path share.
#pragma once

#include <netfold/engine/engine.hpp>

#include "module.hpp"
#include "transport.hpp"

// kind, rank at fault, text.
using PythonFailure = std::optional<std::tuple<int, int, std::string>>;
inline PythonFailure tuple_of(const netfold::collective::Failure& failure) {
  if (!failure) return std::nullopt;
  return std::tuple(static_cast<int>(failure.kind), failure.rank, failure.text);
}

// A value of an enumeration of `count` values. Throws nb::value_error for any other.
template <class Enum>
Enum checked(int value, int count, const char* what) {
  if (value >= 0 && value < count) return static_cast<Enum>(value);
  const std::string text =
      std::string(what) + " " + std::to_string(value) + " does not exist, expected 0 to " + std::to_string(count - 1);
  throw nb::value_error(text.c_str());
}
inline auto kind_of(int value) {
  using namespace netfold::collective;
  return checked<Kind>(value, kKindCount, "operation");
}
inline void set_element(netfold::collective::Call& call, int value) {
  using namespace netfold::collective;
  const auto element = checked<Element>(value, kElementCount, "element");
  if (!is_valid_element(static_cast<std::uint8_t>(element))) throw nb::value_error("this element does not exist");
  call.set_element(element);
}
inline auto algorithm_of(int value) {
  using namespace netfold::collective;
  return checked<AlgorithmId>(value, kAlgorithmCount, "algorithm");
}

// A group's path to one of its switches.
struct Shard {
  std::shared_ptr<netfold::engine::Group> group;
  std::size_t number;  // by the order of attaching
};

// After a wait: raise the exception of a signal handler, if it ended the wait.
void raise_pending();

// The channel of a membership of a switch; its fields are keyword arguments (Shard.stand_by). Takes the port.
std::unique_ptr<netfold::collective::Channel> channel_of(const netfold::engine::Group& group, DataPort& port,
                                                         const nb::kwargs& membership);

// Where the user's program made the present call: "/path/train.py:88", or nullptr where the stack has no Python frame
// (a hook of a C++ thread). Needs the GIL. The text is never freed: there is one for each line that calls,
// and a bound. Cost: 0.1 us
// for each frame.
const char* call_site();
// Skip frames of files below `folder`.
void hide_from_call_sites(const std::string& folder);

void bind_group(nb::module_& engine);
void bind_switch_path(nb::module_& engine);
