#include "server/walls/files.h"

#include <fcntl.h>
#include <linux/landlock.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <stdexcept>

namespace gpupool::server::walls {
namespace {

namespace fs = std::filesystem;

// The kernel's, as of its sixth version: the system's header may be older than the kernel.
struct RulesetAttributes {
  uint64_t files = 0, network = 0, scoped = 0;
};
constexpr uint64_t kTruncate = uint64_t{1} << 14;
constexpr uint64_t kScopeAbstractSockets = 1, kScopeSignals = 2;

constexpr uint64_t kReadFile = LANDLOCK_ACCESS_FS_READ_FILE;
constexpr uint64_t kRead = kReadFile | LANDLOCK_ACCESS_FS_READ_DIR;
// NVIDIA's driver opens with O_TRUNC what it writes.
constexpr uint64_t kUse = kRead | LANDLOCK_ACCESS_FS_WRITE_FILE | kTruncate;
constexpr uint64_t kCache = kReadFile | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_MAKE_REG |
                            LANDLOCK_ACCESS_FS_REMOVE_FILE | kTruncate;
constexpr uint64_t kOfFiles = kReadFile | LANDLOCK_ACCESS_FS_WRITE_FILE | kTruncate;

uint64_t handled(int version) {
  uint64_t all = (LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1;
  if (version >= 2) all |= LANDLOCK_ACCESS_FS_REFER;
  if (version >= 3) all |= kTruncate;
  return all;
}

uint64_t rights(FileRule::Access access) {
  switch (access) {
    case FileRule::Access::read:
      return kRead;
    case FileRule::Access::use:
      return kUse;
    case FileRule::Access::cache:
      return kCache;
  }
  return 0;
}

struct Closing {
  int descriptor;
  ~Closing() {
    if (descriptor >= 0) close(descriptor);
  }
};

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("landlock: " + what + ": " + std::strerror(errno));
}

void permit(int ruleset, const FileRule& rule, uint64_t all) {
  const Closing path{open(rule.path.c_str(), O_PATH | O_CLOEXEC)};
  struct stat status{};
  if (path.descriptor < 0 || fstat(path.descriptor, &status) != 0) {
    if (errno == ENOENT || errno == EACCES || errno == ENOTDIR || errno == ELOOP) return;
    fail(rule.path);
  }
  landlock_path_beneath_attr attributes{};
  attributes.allowed_access = rights(rule.access) & all & (S_ISDIR(status.st_mode) ? ~uint64_t{0} : kOfFiles);
  attributes.parent_fd = path.descriptor;
  if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &attributes, 0) != 0)
    fail(rule.path);
}

void addDevices(std::vector<FileRule>& rules) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/dev/", error))
    if (entry.path().filename().string().starts_with("nvidia"))
      rules.push_back({entry.path(), FileRule::Access::use});
  for (const char* path :
       {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/infiniband", "/dev/gdrdrv"})
    rules.push_back({path, FileRule::Access::use});
}

}  // namespace

std::vector<FileRule> filesOfWorkers(const std::string& driver) {
  std::vector<FileRule> rules;
  for (const char* path : {"/usr",
                           "/lib",
                           "/lib64",
                           "/sys",
                           "/etc/ld.so.cache",
                           "/etc/ucx",
                           "/etc/libnl",
                           "/etc/localtime",
                           "/etc/machine-id",
                           "/etc/nvidia",
                           "/etc/nsswitch.conf",
                           "/etc/libibverbs.d",
                           "/proc/cpuinfo",
                           "/proc/devices",
                           "/proc/driver",
                           "/proc/filesystems",
                           "/proc/meminfo",
                           "/proc/modules",
                           "/proc/net",
                           "/proc/stat",
                           "/proc/sys",
                           "/proc/version"})
    rules.push_back({path});
  rules.push_back({"/proc/self", FileRule::Access::use});
  addDevices(rules);
  std::error_code error;
  if (!driver.empty() && driver[0] == '/') {
    rules.push_back({fs::path(driver).parent_path()});
    rules.push_back({fs::canonical(driver, error).parent_path()});
  }
  rules.push_back({fs::read_symlink("/proc/self/exe", error).parent_path()});
  if (const char* folders = std::getenv("LD_LIBRARY_PATH")) {
    std::istringstream list(folders);
    for (std::string folder; std::getline(list, folder, ':');)
      if (folder.starts_with('/')) rules.push_back({folder});
  }
  // "/" would be everything.
  std::erase_if(rules, [](const FileRule& rule) { return rule.path.empty() || rule.path == "/"; });
  return rules;
}

int landlockVersion() {
  const long version = syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
  return version > 0 ? static_cast<int>(version) : 0;
}

void permitOnly(const std::vector<FileRule>& rules) {
  const int version = landlockVersion();
  RulesetAttributes attributes;
  attributes.files = handled(version);
  size_t bytes = sizeof attributes.files;
  if (version >= 6) {
    attributes.scoped = kScopeAbstractSockets | kScopeSignals;
    bytes = sizeof attributes;
  }
  const Closing ruleset{static_cast<int>(syscall(SYS_landlock_create_ruleset, &attributes, bytes, 0))};
  if (ruleset.descriptor < 0) fail("landlock_create_ruleset");
  for (const FileRule& rule : rules) permit(ruleset.descriptor, rule, attributes.files);
  if (syscall(SYS_landlock_restrict_self, ruleset.descriptor, 0) != 0) fail("landlock_restrict_self");
}

}  // namespace gpupool::server::walls
