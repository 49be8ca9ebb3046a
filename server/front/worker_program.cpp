#include "server/front/worker_program.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace gpupool::server {

WorkerProgram::WorkerProgram(std::string path) : path_(std::move(path)) {
  const int file = access(path_.c_str(), X_OK) == 0 ? open(path_.c_str(), O_PATH | O_CLOEXEC) : -1;
  if (file < 0)
    error_ = errno;
  else
    file_ = std::make_shared<kj::AutoCloseFd>(file);
}

int WorkerProgram::descriptor() const {
  if (file_ == nullptr) KJ_FAIL_SYSCALL("the worker's executable cannot be run", error_, path_.c_str());
  return *file_;
}

bool WorkerProgram::isSameFile(const WorkerProgram& other) const {
  struct stat mine{}, its{};
  if (file_ == nullptr || other.file_ == nullptr) return false;
  if (fstat(*file_, &mine) != 0 || fstat(*other.file_, &its) != 0) return false;
  return mine.st_dev == its.st_dev && mine.st_ino == its.st_ino;
}

}  // namespace gpupool::server
