#pragma once
// A session of everything that has contents, for tests that send it elsewhere.

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "server/worker/tests/client.h"

namespace gpupool::server::test {

inline constexpr uint64_t kExec = makeHandle(handles::Kind::graphExec, 1, 1);
inline constexpr unsigned char kGraphByte = 0x5a;

// What a session holds, one line for each part. Everything stands still.
std::string picture(Session& session);

struct Folder {
  Folder() : path(std::filesystem::temp_directory_path() / ("stream-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path);
    descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
  int descriptor = -1;  // the session's
};

// A program of everything that has contents. Its graph writes kGraphByte.
class Program {
 public:
  Program();
  // An awaited call, which must succeed.
  void run(uint32_t row, const Arguments& arguments);

  Folder folder;
  Client client;
  uint64_t base = 0, pinned = 0;

 private:
  void makeDeviceMemory();
  void makeCode();
  void makeArray();
  void makeGraph();
  void makeStreamWord();
};

// One for all tests, which leave it as it was but for the last: a variable lies at the same address in
// another process only if all code that this one has ever loaded is loaded there.
Program& theProgram();

}  // namespace gpupool::server::test
