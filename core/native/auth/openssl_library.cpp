#include <dlfcn.h>
#include <netfold/auth/openssl_library.hpp>

namespace netfold::auth {

OpenSslLibrary::OpenSslLibrary(const char* name) : name_(name), library_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
  if (library_ != nullptr) return;
  const char* why = dlerror();
  missing_ = "OpenSSL's " + name_ + " cannot be opened (" + (why != nullptr ? why : "no reason given") + ")";
}

void* OpenSslLibrary::address_of(const char* symbol) {
  if (library_ == nullptr) return nullptr;
  void* address = dlsym(library_, symbol);
  if (address == nullptr) missing_ = "OpenSSL's " + name_ + " has no " + symbol;
  return address;
}

}  // namespace netfold::auth
