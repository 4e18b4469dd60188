#include "call_site.hpp"

#include <Python.h>

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int kMostFrames = 64;

struct Known {
  std::string file;
  bool hidden = false;
  std::map<int, std::string> lines;  // nodes stay where they are
};

// By code object, each of which is kept alive so that its address means no other. Guarded by the GIL.
std::unordered_map<PyCodeObject*, Known>& known() {
  static auto* table = new std::unordered_map<PyCodeObject*, Known>;
  return *table;
}

std::vector<std::string>& folders() {
  static auto* list = new std::vector<std::string>;
  return *list;
}

// "<" where the code object has no readable file name.
std::string file_name(PyCodeObject* code) {
  PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_filename");
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
  if (text == nullptr) PyErr_Clear();
  std::string found = text == nullptr ? "<" : text;
  Py_XDECREF(name);
  return found;
}

Known& look_up(PyCodeObject* code) {
  const auto [entry, is_new] = known().try_emplace(code);
  if (is_new) {
    Py_INCREF(reinterpret_cast<PyObject*>(code));
    Known& place = entry->second;
    place.file = file_name(code);
    place.hidden = place.file.starts_with("<");  // generated
    for (const std::string& folder : folders()) place.hidden |= place.file.starts_with(folder);
  }
  return entry->second;
}

// A new reference to the calling frame, or nullptr. By the attribute: PyFrame_GetBack is not in the stable ABI.
PyFrameObject* caller_of(PyFrameObject* frame) {
  static PyObject* const name = PyUnicode_InternFromString("f_back");
  PyObject* back = PyObject_GetAttr(reinterpret_cast<PyObject*>(frame), name);
  if (back == nullptr) PyErr_Clear();
  if (back != Py_None) return reinterpret_cast<PyFrameObject*>(back);
  Py_DECREF(back);
  return nullptr;
}

}  // namespace

void hide_from_call_sites(const std::string& folder) { folders().push_back(folder); }

const char* call_site() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return nullptr;
  Py_INCREF(reinterpret_cast<PyObject*>(frame));
  const char* found = nullptr;
  for (int depth = 0; frame != nullptr && depth < kMostFrames && found == nullptr; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Known& place = look_up(code);
    if (!place.hidden) {
      std::string& text = place.lines[PyFrame_GetLineNumber(frame)];
      if (text.empty()) text = place.file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      found = text.c_str();
    }
    Py_DECREF(reinterpret_cast<PyObject*>(code));
    PyFrameObject* back = found == nullptr ? caller_of(frame) : nullptr;
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = back;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  return found;
}
