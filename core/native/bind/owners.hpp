// Python objects that own the buffers of operations.
//
// The engine releases an owner on any thread and without the GIL, so `release` only puts the owner on a list. A thread
// that has the GIL drops the listed objects: at the end of every call that submits or waits, and after each event that
// netfold's own threads take from the engine, at least once a second. After the interpreter's end nothing drops them.
#pragma once

#include <netfold/engine/operation.hpp>

#include "module.hpp"

// Owns `object`; nullptr for None. All three functions need the GIL.
netfold::engine::BufferOwnerPtr owner_of(nb::handle object);
// Owns an exported buffer, from which the view is moved.
netfold::engine::BufferOwnerPtr owner_of(Py_buffer& view);
// Drop the objects of released owners.
void drop_released_owners();
// The same at the end of a scope, however it ends.
struct DropReleasedOwners {
  ~DropReleasedOwners() { drop_released_owners(); }
};
