#include "server/worker/output.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace gpupool::server {

Output::Output() {
  file_ = memfd_create("gpupool-output", MFD_CLOEXEC);
  // Append mode: truncating after a read must not leave a hole before the next write.
  if (file_ < 0 || fcntl(file_, F_SETFL, O_APPEND) != 0 || dup2(file_, STDOUT_FILENO) < 0)
    throw std::runtime_error(std::string("cannot capture device output: ") + std::strerror(errno));
}

Output::~Output() {
  if (file_ >= 0) close(file_);
}

std::string Output::take() {
  std::lock_guard lock(mutex_);
  std::fflush(stdout);
  struct stat info {};
  if (fstat(file_, &info) != 0 || info.st_size <= read_) return {};
  std::string text(std::min<size_t>(info.st_size - read_, kMost), '\0');
  ssize_t n = pread(file_, text.data(), text.size(), read_);
  if (n <= 0) return {};
  text.resize(n);
  read_ += n;
  if (read_ == info.st_size && ftruncate(file_, 0) == 0) read_ = 0;
  return text;
}

}  // namespace gpupool::server
