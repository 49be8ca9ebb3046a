#include "server/front/worker_program.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <unistd.h>

#include <cerrno>

namespace gpupool::server {

WorkerProgram::WorkerProgram(std::string path) : path_(std::move(path)) {
  const int file = open(path_.c_str(), O_PATH | O_CLOEXEC);
  if (file < 0)
    error_ = errno;
  else
    file_ = std::make_shared<kj::AutoCloseFd>(file);
}

int WorkerProgram::descriptor() const {
  int error = file_ == nullptr ? error_ : 0;
  if (error == 0 && faccessat(*file_, "", X_OK, AT_EMPTY_PATH) != 0) error = errno;
  if (error != 0) KJ_FAIL_SYSCALL("the worker's executable cannot be run", error, path_.c_str());
  return *file_;
}

}  // namespace gpupool::server
