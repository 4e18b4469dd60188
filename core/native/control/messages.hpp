// Control messages, as netfold/switch_protocol/control_messages.py describes them.
#pragma once

#include <netfold/control/msgpack.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace netfold::control {

// The switch refused a request, or this process cannot use its reply. The text is a sentence without its subject.
struct ReplyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Checks a switch's reply, which should have the type `kind`. Throws ReplyError, or ProtocolError for another type.
// is_first: the message replies to a first message, so it carries a version.
void check_reply(const Value& message, std::string_view kind, bool is_first);

// The fields of a message. They throw ProtocolError where the field is absent or has another type.
std::uint64_t unsigned_of(const Value& message, std::string_view name, std::uint64_t most);
const Value::Bytes& bytes_of(const Value& message, std::string_view name);
std::vector<int> ranks_of(const Value& message);
// False and -1 where the field is absent or has another type.
bool flag_of(const Value& message, std::string_view name);
int fault_of(const Value& message);
// Text of the switch for people: one line of a bounded length; empty where the field is absent or no text.
std::string text_of(const Value& message, std::string_view name);

// A time for people: "2.5 s".
std::string seconds(std::int64_t ns);

}  // namespace netfold::control
