#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine.hpp"

namespace {

constexpr int kMaxFrames = 64;

// A program may make code objects without end. Beyond these numbers the cache begins anew, and new sites have no text.
constexpr std::size_t kMaxCodes = 4096;
constexpr std::size_t kMaxTexts = 65536;

struct CodeSites {
  std::string file;
  bool hidden = false;
  std::map<int, const char*> lines;  // call sites by line
};

// By code object, each kept alive so that no other object gets its address. Guarded by the GIL.
using Cache = std::unordered_map<PyCodeObject*, CodeSites>;
Cache& cache() {
  static auto* table = new Cache;
  return *table;
}

// The text of a call site, for as long as the process lives; nullptr where there are too many.
const char* text_of(const std::string& file, int line) {
  static auto* texts = new std::unordered_set<std::string>;  // never moves its nodes
  std::string text = file + ":" + std::to_string(line);
  if (texts->size() >= kMaxTexts) {
    const auto known = texts->find(text);
    return known == texts->end() ? nullptr : known->c_str();
  }
  return texts->insert(std::move(text)).first->c_str();
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
  if (cache().size() >= kMaxCodes && !cache().contains(code)) {
    Cache old;
    old.swap(cache());
    for (const auto& [dropped, sites] : old) Py_DECREF(reinterpret_cast<PyObject*>(dropped));
  }
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
  bool is_found = false;
  for (int depth = 0; frame != nullptr && depth < kMaxFrames && !is_found; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    CodeSites& sites = look_up(code);
    if (!sites.hidden) {
      const int line = PyFrame_GetLineNumber(frame);
      const auto [site, is_new] = sites.lines.try_emplace(line, nullptr);
      if (is_new) site->second = text_of(sites.file, line);
      found = site->second;
      is_found = true;
    }
    Py_DECREF(reinterpret_cast<PyObject*>(code));
    PyFrameObject* back = is_found ? nullptr : caller_of(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = back;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  return found;
}
