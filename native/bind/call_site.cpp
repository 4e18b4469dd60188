#include "call_site.hpp"

#include <Python.h>

#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int kMostFrames = 64;

struct Known {
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

Known& look_up(PyCodeObject* code) {
  const auto [entry, is_new] = known().try_emplace(code);
  if (is_new) {
    Py_INCREF(code);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) PyErr_Clear();
    const std::string_view name = file == nullptr ? "<" : file;
    entry->second.hidden = name.starts_with("<");  // generated
    for (const std::string& folder : folders()) entry->second.hidden |= name.starts_with(folder);
  }
  return entry->second;
}

}  // namespace

void hide_from_call_sites(const std::string& folder) { folders().push_back(folder); }

const char* call_site() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return nullptr;
  Py_INCREF(frame);
  const char* found = nullptr;
  for (int depth = 0; frame != nullptr && depth < kMostFrames && found == nullptr; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Known& place = look_up(code);
    if (!place.hidden) {
      std::string& text = place.lines[PyFrame_GetLineNumber(frame)];
      if (text.empty()) {
        const char* file = PyUnicode_AsUTF8(code->co_filename);
        text = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      }
      found = text.c_str();
    }
    Py_DECREF(code);
    PyFrameObject* back = found == nullptr ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}
