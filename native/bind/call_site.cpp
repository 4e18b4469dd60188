#include <map>
#include <unordered_map>
#include <vector>

#include "engine.hpp"

namespace {

constexpr int kMaxFrames = 64;

struct CodeSites {
  std::string file;
  bool hidden = false;
  std::map<int, std::string> lines;  // call sites by line; a map never moves its nodes
};

// By code object, each kept alive so that no other object gets its address. Guarded by the GIL.
std::unordered_map<PyCodeObject*, CodeSites>& cache() {
  static auto* table = new std::unordered_map<PyCodeObject*, CodeSites>;
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

CodeSites& look_up(PyCodeObject* code) {
  const auto [entry, is_new] = cache().try_emplace(code);
  if (is_new) {
    Py_INCREF(reinterpret_cast<PyObject*>(code));
    CodeSites& sites = entry->second;
    sites.file = file_name(code);
    sites.hidden = sites.file.starts_with("<");  // generated code
    for (const std::string& folder : folders()) sites.hidden |= sites.file.starts_with(folder);
  }
  return entry->second;
}

// A new reference to the calling frame, or nullptr. Reads the attribute: PyFrame_GetBack is not in the stable ABI.
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
  for (int depth = 0; frame != nullptr && depth < kMaxFrames && found == nullptr; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    CodeSites& sites = look_up(code);
    if (!sites.hidden) {
      std::string& text = sites.lines[PyFrame_GetLineNumber(frame)];
      if (text.empty()) text = sites.file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
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
