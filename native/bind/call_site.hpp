// Where in the user's program the present call was made.
#pragma once

#include <string>

// "/path/train.py:88", or nullptr where no Python is on the stack (a hook of a C++ thread). Needs the GIL. The text
// lives for ever: there are as many as lines that call. Costs 0.1 us a frame.
const char* call_site();

// Frames of files below `folder` are passed over.
void hide_from_call_sites(const std::string& folder);
