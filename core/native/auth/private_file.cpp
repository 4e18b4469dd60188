#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <netfold/auth/private_file.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace netfold::auth {
namespace {

constexpr std::size_t kMostBytes = 1 << 20;

}  // namespace

std::string read_private(const std::string& path) {
  // A pipe without a writer would block the open.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(fd < 0 ? nullptr : ::fdopen(fd, "r"), std::fclose);
  struct stat about{};
  if (file == nullptr || ::fstat(fd, &about) != 0) {
    const int error = errno;
    if (file == nullptr && fd >= 0) ::close(fd);
    throw std::runtime_error(std::strerror(error));
  }
  if (!S_ISREG(about.st_mode) || (about.st_uid != 0 && about.st_uid != ::geteuid())) {
    throw std::runtime_error("it is no file of this user or of root: its owner knows its content");
  }
  if ((about.st_mode & 077) != 0) throw std::runtime_error("it can be read by others: chmod 600");
  std::string text(kMostBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0) throw std::runtime_error("it cannot be read");
  if (text.size() > kMostBytes) throw std::runtime_error("it is longer than 1 MiB");
  constexpr const char* kSpace = " \t\n\v\f\r";
  text.erase(text.find_last_not_of(kSpace) + 1);
  return text.substr(std::min(text.find_first_not_of(kSpace), text.size()));
}

}  // namespace netfold::auth
