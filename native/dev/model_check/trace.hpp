// Converts between transitions and the steps of a trace.
#pragma once

#include "transitions.hpp"

namespace netfold::model_check {

// Returns the steps of a path from the first state, as `replay` takes them.
std::vector<std::string> trace_steps(Transitions& transitions, const std::vector<Transition>& path);

}  // namespace netfold::model_check
