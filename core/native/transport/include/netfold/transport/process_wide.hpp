// The one object of a type in a process, which a fork may copy at any time.
#pragma once

#include <pthread.h>

#include <mutex>

namespace netfold::transport {

// Returns the object, made in the first call and never destroyed: threads of an ending process may still use it.
// Make it when the library is loaded: a child of a fork during the first call would wait for the thread that makes it.
// kMutex: held over a fork, since no thread of the child could release a lock that a thread of the parent held.
// kInChild: called in a child of a fork before kMutex is released.
template <class Object, std::mutex Object::* kMutex, void (Object::*kInChild)() = nullptr>
Object& process_wide() {
  static auto* const object = [] {
    static auto* const made = new Object;
    pthread_atfork([] { (made->*kMutex).lock(); }, [] { (made->*kMutex).unlock(); },
                   [] {
                     if constexpr (kInChild != nullptr) (made->*kInChild)();
                     (made->*kMutex).unlock();
                   });
    return made;
  }();
  return *object;
}

}  // namespace netfold::transport
