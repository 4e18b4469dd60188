// Moves in words, and back: what a trace is made of.
#pragma once

#include "moves.hpp"

namespace netfold::model_check {

// Each move in words, as `replay` takes them. `moves` lead from the first state.
std::vector<std::string> words_of(Moves& moves, const std::vector<Move>& path);

}  // namespace netfold::model_check
