#pragma once
// The worker's executable, opened once: all workers of a server are of one build, also after an upgrade has
// put another file in its place (rename(2), as package managers do). Sessions begin and move as before until
// the server itself is started again. A script, which its interpreter opens by name, is executed by its path.
//
// Copies share the descriptor. Any thread.

#include <kj/io.h>

#include <memory>
#include <string>

namespace gpupool::server {

class WorkerProgram {
 public:
  WorkerProgram() = default;
  // That it cannot be opened shows when a worker is started.
  WorkerProgram(std::string path);  // NOLINT(google-explicit-constructor): options and tests name a path
  WorkerProgram(const char* path)
      : WorkerProgram(std::string(path)) {}  // NOLINT(google-explicit-constructor)

  const std::string& path() const { return path_; }
  // False also if one of the two could not be opened. A file that was written over is the same one.
  bool isSameFile(const WorkerProgram& other) const;
  // For execveat; throws kj::Exception, saying why, where it could not be opened or was no executable.
  int descriptor() const;

 private:
  std::string path_;
  int error_ = 0;  // errno, if there is no file
  std::shared_ptr<kj::AutoCloseFd> file_;
};

}  // namespace gpupool::server
