#pragma once
// The wall around files, by Landlock (Linux 5.13).

#include <string>
#include <vector>

namespace gpupool::server::walls {

struct FileRule {
  std::string path;  // with what lies below
  enum class Access {
    read,
    use,
    cache
  } access = Access::read;  // use: read and write; cache: Plan.moduleCache
};

// Those that exist here, without the module cache's: what the driver, the loader and UCX open.
std::vector<FileRule> filesOfWorkers(const std::string& driver);

// The kernel's version of Landlock; 0: it has none, or it is switched off.
int landlockVersion();

// Of a thread and its later children, when no_new_privs is set. Throws std::runtime_error.
void permitOnly(const std::vector<FileRule>& rules);

}  // namespace gpupool::server::walls
