// Moves in words, and back: what a trace is made of.
#pragma once

#include "transitions.hpp"

namespace netfold::model_check {

// Each move in words, as `replay` takes them. `transitions` lead from the first state.
std::vector<std::string> trace_steps(Transitions& transitions, const std::vector<Transition>& path);

}  // namespace netfold::model_check
