// A library of OpenSSL 3, opened at run time: one build serves hosts with and without it.
#pragma once

#include <string>
#include <type_traits>

namespace netfold::auth {

class OpenSslLibrary {
 public:
  // name: with its version, which fixes the functions, such as "libcrypto.so.3". Never closed.
  explicit OpenSslLibrary(const char* name);

  // Sets `function` to that of the library, or of a library on which it depends.
  template <class Function>
  void find(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(address_of(symbol));
  }
  // Why the library cannot be used; empty where it can.
  const std::string& missing() const { return missing_; }

 private:
  void* address_of(const char* symbol);

  const std::string name_;
  void* const library_;
  std::string missing_;
};

}  // namespace netfold::auth
