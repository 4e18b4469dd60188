#include "owners.hpp"

#include <atomic>
#include <utility>

namespace {

class PythonOwner;
std::atomic<PythonOwner*> released{nullptr};  // the newest; a linked list

class PythonOwner final : public netfold::engine::BufferOwner {
 public:
  explicit PythonOwner(nb::handle object) : object_(object.inc_ref().ptr()) {}
  explicit PythonOwner(const Py_buffer& view) : view_(view) {}

  void release() noexcept override {
    next_ = released.load(std::memory_order_relaxed);
    while (!released.compare_exchange_weak(next_, this, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  // Drops the object. Returns the owner released before.
  PythonOwner* drop() {
    PythonOwner* const next = next_;
    PyObject* const object = object_;
    Py_buffer view = view_;
    delete this;
    PyBuffer_Release(&view);  // does nothing where there is no view
    Py_XDECREF(object);
    return next;
  }

 private:
  ~PythonOwner() = default;

  PyObject* object_ = nullptr;
  Py_buffer view_{};
  PythonOwner* next_ = nullptr;
};

}  // namespace

netfold::engine::BufferOwnerPtr owner_of(nb::handle object) {
  return netfold::engine::BufferOwnerPtr(object.is_none() ? nullptr : new PythonOwner(object));
}

netfold::engine::BufferOwnerPtr owner_of(Py_buffer& view) {
  netfold::engine::BufferOwnerPtr owner(new PythonOwner(view));
  view.obj = nullptr;
  return owner;
}

void drop_released_owners() {
  // A destructor may run Python code, which must not find an exception pending.
  if (released.load(std::memory_order_relaxed) == nullptr || PyErr_Occurred() != nullptr) return;
  // A destructor may call netfold, and so this function: it then drops what was released meanwhile.
  for (PythonOwner* owner = released.exchange(nullptr, std::memory_order_acquire); owner != nullptr;) {
    owner = owner->drop();
  }
}
