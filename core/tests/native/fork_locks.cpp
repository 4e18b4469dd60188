// `fork_locks regions|descriptors|status SECONDS`: threads begin to use an object that is locked over a fork, and the
// process forks 40 times. Exit code 1: a child cannot use the object within SECONDS.
#include <sys/wait.h>
#include <unistd.h>
#include <netfold/engine/status.hpp>
#include <netfold/transport/shm/shm_registry.hpp>
#include <netfold/transport/socket.hpp>

#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

using netfold::engine::StatusSegment;
using netfold::transport::Fd;
using netfold::transport::ProcessFd;
using netfold::transport::ShmRegistry;

int main(int, char** arguments) {
  static std::byte nothing{};
  const std::map<std::string, std::function<void()>> uses{
      {"regions", [] { ShmRegistry::instance().find(&nothing, 1); }},
      {"descriptors", [] { ProcessFd one(Fd(dup(0))); }},
      {"status", [] { StatusSegment::instance().close(StatusSegment::instance().open()); }},
  };
  const auto& use = uses.at(arguments[1]);
  const auto seconds = static_cast<unsigned>(std::atoi(arguments[2]));
  for (int thread = 0; thread < 3; ++thread) {
    std::thread([&use] {
      while (true) use();
    }).detach();
  }
  int result = 0;
  for (int forks = 0; forks < 40 && result == 0; ++forks) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(seconds);
      use();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    result = status == 0 ? 0 : 1;
  }
  _exit(result);
}
