// Files with secrets.
#pragma once

#include <string>

namespace netfold::auth {

// Returns the content of a file of this user or root that no other user can read, without the whitespace at both ends.
// The rules are those of read_private in netfold/switch_protocol/control_messages.py.
// Throws std::runtime_error with the reason, which has none of the content.
std::string read_private(const std::string& path);

}  // namespace netfold::auth
