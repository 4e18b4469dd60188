#pragma once

#include <string>

// Where the user's program made the present call: "/path/train.py:88", or nullptr where the stack has no Python frame
// (a hook of a C++ thread). Needs the GIL. The text is never freed: there is one for each line that calls. Cost: 0.1 us
// for each frame.
const char* call_site();

// Skip frames of files below `folder`.
void hide_from_call_sites(const std::string& folder);
