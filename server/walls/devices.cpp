#include "server/walls/devices.h"

#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "base/capabilities.h"

namespace gpupool::server::walls {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAlways[] = {"null", "zero", "full", "random", "urandom"};
// Of the driver as a whole: each GPU has a node besides.
constexpr const char* kOfDriver[] = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"};
constexpr std::pair<const char*, const char*> kLinks[] = {
    {"fd", "/proc/self/fd"}, {"stdin", "fd/0"}, {"stdout", "fd/1"}, {"stderr", "fd/2"}};
constexpr unsigned long kRestrained = MS_NOSUID | MS_NOEXEC;

void succeed(long result, const std::string& what) {
  if (result < 0) throw std::runtime_error(what + ": " + std::strerror(errno));
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void writeOnce(const char* path, const std::string& text) {
  const Descriptor file{open(path, O_WRONLY | O_CLOEXEC)};
  succeed(file.number, path);
  succeed(write(file.number, text.data(), text.size()), path);
}

// In it only this process's user and group have a number. What they may open is as before, and so are its
// supplementary groups.
void leaveUserNamespace() {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  succeed(unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare, also of a user namespace");
  // The files below are its own only while it may be looked into. It was not, if it could not read its
  // program.
  succeed(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "PR_SET_DUMPABLE");
  const auto itself = [](unsigned id) { return std::to_string(id) + " " + std::to_string(id) + " 1"; };
  writeOnce("/proc/self/setgroups", "deny");  // without it the kernel takes no map of groups
  writeOnce("/proc/self/uid_map", itself(user));
  writeOnce("/proc/self/gid_map", itself(group));
}

// A partition of a GPU (MIG) is opened by way of further nodes, which the driver lists: "gpu3/gi1/access 12".
void addPartitions(const std::string& node, const std::string& driver, const std::string& dev,
                   std::vector<std::string>& nodes) {
  const std::string own = "gpu" + node.substr(std::strlen("nvidia")) + "/";
  std::ifstream list(driver + "/nvidia-caps/mig-minors");
  std::string what;
  unsigned minor = 0;
  while (list >> what >> minor) {
    const std::string name = "nvidia-caps/nvidia-cap" + std::to_string(minor);
    if (what.starts_with(own) && exists(dev + "/" + name)) nodes.push_back(name);
  }
}

void addAdapters(const std::string& dev, std::vector<std::string>& nodes) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dev + "/infiniband", error))
    if (!entry.is_directory(error)) nodes.push_back("infiniband/" + entry.path().filename().string());
  if (exists(dev + "/gdrdrv")) nodes.emplace_back("gdrdrv");
}

// All that any worker might have.
std::vector<std::string> everyNode(const std::string& dev) {
  std::vector<std::string> nodes = nodesOf({{}, true}, "", dev);
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dev, error))
    if (entry.path().filename().string().starts_with("nvidia") && !entry.is_directory(error))
      nodes.push_back(entry.path().filename());
  return nodes;
}

// The node is in the working directory, which is the folder as it was.
void addNode(const std::string& folder, const std::string& node) {
  const std::string path = folder + "/" + node;
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  const Descriptor file{open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444)};
  succeed(file.number, path);
  succeed(mount(node.c_str(), path.c_str(), nullptr, MS_BIND, nullptr), path);
}

[[noreturn]] void tryAsChild(uid_t user, int result) {
  std::string why;
  try {
    if (user != 0) {
      succeed(setgroups(0, nullptr), "setgroups");
      succeed(setresgid(user, user, user), "setresgid");
      succeed(setresuid(user, user, user), "setresuid");
      succeed(keepCapabilities({}) ? 0 : -1, "capset");
    }
    const auto nodes = everyNode("/dev");
    leaveMountNamespace();
    keepNodes("/dev", nodes);
  } catch (const std::exception& error) {
    why = error.what();
  }
  const bool told = write(result, why.data(), why.size()) == static_cast<ssize_t>(why.size());
  _exit(told && why.empty() ? 0 : 1);
}

}  // namespace

std::string Devices::text() const {
  std::string all;
  for (const std::string& gpu : gpus) all += gpu + ",";
  all += rdma ? "rdma" : "";
  if (all.ends_with(',')) all.pop_back();
  return all.empty() ? "none" : all;
}

Devices Devices::parse(std::string_view text) {
  Devices devices;
  while (!text.empty() && text != "none") {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view word = text.substr(0, end);
    if (word == "rdma")
      devices.rdma = true;
    else
      devices.gpus.emplace_back(word);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return devices;
}

std::string nodeOf(const std::string& gpu, const std::string& driver, const std::string& dev) {
  std::string address = gpu;  // the driver's folders are in small letters, what its library says is not
  for (char& c : address) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (address.find('/') != address.npos) return "";
  std::ifstream about(driver + "/nvidia/gpus/" + address + "/information");
  unsigned minor = 0;
  for (std::string line; std::getline(about, line);) {
    if (std::sscanf(line.c_str(), "Device Minor: %u", &minor) != 1) continue;
    const std::string node = "nvidia" + std::to_string(minor);
    return exists(dev + "/" + node) ? node : "";
  }
  return "";
}

std::vector<std::string> nodesOf(const Devices& devices, const std::string& driver, const std::string& dev) {
  std::vector<std::string> nodes;
  const auto add = [&](const char* name) {
    if (exists(dev + "/" + name)) nodes.emplace_back(name);
  };
  for (const char* name : kAlways) add(name);
  if (!devices.gpus.empty())
    for (const char* name : kOfDriver) add(name);
  for (const std::string& gpu : devices.gpus) {
    const std::string node = nodeOf(gpu, driver, dev);
    if (node.empty() || std::find(nodes.begin(), nodes.end(), node) != nodes.end())
      continue;  // it is gone, or two partitions (MIG) are of one GPU
    nodes.push_back(node);
    addPartitions(node, driver, dev, nodes);
  }
  if (devices.rdma) addAdapters(dev, nodes);
  return nodes;
}

void leaveMountNamespace() {
  if (unshare(CLONE_NEWNS) != 0) {
    if (errno != EPERM) succeed(-1, "unshare");
    leaveUserNamespace();
  }
  succeed(mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr), "mount of /");
}

void keepNodes(const std::string& folder, const std::vector<std::string>& nodes) {
  const Descriptor here{open(".", O_PATH | O_DIRECTORY | O_CLOEXEC)};
  succeed(chdir(folder.c_str()), folder);  // what is there stays in reach of relative paths, for a moment
  succeed(mount("gpupool", folder.c_str(), "tmpfs", kRestrained, "mode=0755,size=256k"),
          "a tmpfs at " + folder);
  for (const std::string& node : nodes) addNode(folder, node);
  for (const auto& [name, target] : kLinks)
    succeed(symlink(target, (folder + "/" + name).c_str()), folder + "/" + name);
  succeed(mount(nullptr, folder.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | kRestrained, nullptr),
          folder + ", to be read only");
  if (here.number < 0 || fchdir(here.number) != 0) succeed(chdir("/"), "/");
}

void keepDevices(const Devices& devices) {
  const auto nodes = nodesOf(devices);  // the driver's files are the same in the other namespace
  leaveMountNamespace();
  keepNodes("/dev", nodes);
}

std::string whyNoOwnDevices(uid_t user) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return std::string("pipe: ") + std::strerror(errno);
  const pid_t child = fork();
  if (child == 0) tryAsChild(user, ends[1]);
  close(ends[1]);
  const Descriptor result{ends[0]};
  if (child < 0) return std::string("fork: ") + std::strerror(errno);
  char text[256] = "";
  const ssize_t length = read(result.number, text, sizeof text - 1);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  return length > 0 ? std::string(text, static_cast<size_t>(length)) : "a process that tried it was killed";
}

}  // namespace gpupool::server::walls
