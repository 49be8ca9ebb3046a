#pragma once
// What the tests of this folder share.

#include <stdlib.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <string>

namespace gpupool::test {

struct Folder {
  Folder() {
    char pattern[] = "/tmp/gpupool-test-XXXXXX";
    path = ::mkdtemp(pattern);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path;
};

// The text of what `action` throws; "" if it does not. (Catch2 2 and 3 name their matchers differently.)
inline std::string thrown(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace gpupool::test
