// The programs that load NCCL's plugins share this: the tables, NCCL's log, files by which ranks meet, an end with a
// reason.
#pragma once

#include <dlfcn.h>
#include <netfold/nccl/interface.hpp>

#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace nccl = netfold::nccl;

constexpr double kDeadlineS = 60;

[[noreturn]] inline void stop(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
  std::exit(1);
}

inline void check(nccl::Result result, const char* what) {
  if (result != nccl::Result::success) stop(std::string(what) + " failed");
}

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void log(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level > nccl::kWarn) return;
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  std::fputc('\n', stderr);
  va_end(values);
}

template <class Table>
const Table& table_of(const char* file, const char* name) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  const void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) stop(dlerror());
  return *static_cast<const Table*>(found);
}

// Files by which ranks tell each other something before there is a connection.
class Folder {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  void write(const std::string& name, const std::vector<char>& what) const {
    const std::string file = path_ + "/" + name;
    std::ofstream(file + ".new", std::ios::binary).write(what.data(), static_cast<std::streamsize>(what.size()));
    if (std::rename((file + ".new").c_str(), file.c_str()) != 0) stop("cannot write " + file);
  }
  std::vector<char> read(const std::string& name) const {
    const std::string file = path_ + "/" + name;
    for (const double until_s = now_s() + kDeadlineS; now_s() < until_s;) {
      std::ifstream in(file, std::ios::binary);
      if (in) return {std::istreambuf_iterator<char>(in), {}};
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    stop("there was no " + file + " after 60 s");
  }

 private:
  std::string path_;
};
