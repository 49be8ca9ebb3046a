#include "pool-manager/cli/places.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "base/options.h"

namespace gpupool::cli {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A directory of ours, or at least one that nobody else can put things into.
bool ours(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid();
}

// unix(7): a socket's path has at most 107 bytes.
bool holdsSockets(const std::string& directory) {
  return directory.size() + 1 + sizeof kManagerSocket <= sizeof(sockaddr_un{}.sun_path);
}

void requireSocketRoom(const std::string& directory) {
  if (!holdsSockets(directory))
    throw std::runtime_error(
        directory +
        ": too long a path for a Unix socket in it; choose another with --state or GPUPOOL_STATE");
}

bool isOwnPool(const std::vector<std::string>& addresses) {
  try {
    return addresses == managerAddresses("");
  } catch (const std::runtime_error&) {  // it can have none
    return false;
  }
}

}  // namespace

std::string executableDirectory() {
  char path[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return ".";
  const std::string whole(path, static_cast<size_t>(length));
  return whole.substr(0, whole.rfind('/'));
}

std::string clientLibraryDirectory() {
  std::string chosen = variable("GPUPOOL_LIBRARY_DIR");
  if (!chosen.empty()) return chosen;
  const std::string path = executableDirectory() + "/../lib/gpupool";
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) != nullptr ? resolved : path;
}

std::string softwareDriver() {
  std::string built = executableDirectory() + "/../lib/libcuda-soft.so";
  const std::string installed = executableDirectory() + "/../lib/gpupool/libcuda-soft.so";
  char resolved[PATH_MAX];
  for (const std::string& path : {built, installed})
    if (::realpath(path.c_str(), resolved) != nullptr) return resolved;
  return built;
}

std::vector<std::string> runtimeDirectories(const std::string& chosen) {
  const std::string named = chosen.empty() ? variable("GPUPOOL_STATE") : chosen;
  if (!named.empty()) {
    requireSocketRoom(named);
    return {named};
  }
  std::vector<std::string> places;
  if (const std::string runtime = variable("XDG_RUNTIME_DIR");
      !runtime.empty() && ours(runtime) && holdsSockets(runtime + "/gpupool"))
    places.push_back(runtime + "/gpupool");
  places.push_back("/tmp/gpupool-" + std::to_string(::geteuid()));
  return places;
}

void makePrivateDirectory(const std::string& path) {
  requireSocketRoom(path);  // a relative one has grown
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw std::runtime_error("cannot make the directory " + path + ": " + std::strerror(errno));
  struct stat info{};
  if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid())
    throw std::runtime_error(
        path + " exists, but is not a directory of this user: remove it or choose another with --state");
  if ((info.st_mode & 077) != 0 && ::chmod(path.c_str(), 0700) != 0)
    throw std::runtime_error(path + ": " + std::strerror(errno));
}

std::vector<std::string> managerAddresses(const std::string& list) {
  std::vector<std::string> addresses;
  for (const std::string& word : options::commaSeparated(list))
    addresses.push_back(word[0] == '/' ? "unix:" + word : word);
  if (!addresses.empty()) return addresses;
  for (const std::string& directory : runtimeDirectories())
    addresses.push_back("unix:" + directory + "/" + kManagerSocket);
  return addresses;
}

std::string noManagerText(const std::vector<std::string>& addresses, const std::string& tried) {
  const std::string what = "no pool manager is reachable (tried " + tried + "): ";
  // A pool of one's own is no help to whoever uses another one.
  if (!isOwnPool(addresses))
    return what +
           "check the address (--manager, GPUPOOL_MANAGER or client.yaml), and on the manager's machine "
           "whether it runs: systemctl status gpupool-manager";
  return what +
         "start a pool on this machine with `gpupool up --detach`, or name its manager with "
         "--manager host:port or GPUPOOL_MANAGER";
}

}  // namespace gpupool::cli
