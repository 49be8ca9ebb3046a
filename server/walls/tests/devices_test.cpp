// A /dev of a worker's own, made of a folder of plain files that stand for nodes: the same code does it, and
// no GPU is needed.
#include "server/walls/devices.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "catch.h"

namespace fs = std::filesystem;
using namespace gpupool::server;
using walls::Devices;

namespace {

constexpr uid_t kOrdinary = 65534;

// dev: the nodes of a machine with two GPUs, of which the second has a partition (MIG). driver: what the
// driver says of them.
class Machine {
 public:
  Machine() {
    char name[] = "/tmp/gpupool-devices-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    folder_ = name;
    fs::permissions(folder_, fs::perms(0755));
    for (const char* node : {"null",
                             "zero",
                             "full",
                             "random",
                             "urandom",
                             "nvidiactl",
                             "nvidia-uvm",
                             "nvidia-modeset",
                             "nvidia3",
                             "nvidia1",
                             "nvidia-caps/nvidia-cap1",
                             "nvidia-caps/nvidia-cap12",
                             "nvidia-caps/nvidia-cap30",
                             "infiniband/uverbs0",
                             "infiniband/rdma_cm",
                             "mem",
                             "kmsg",
                             "fuse",
                             "shm/of-another",
                             "tty"})
      write("dev/" + std::string(node), node);
    write("driver/nvidia/gpus/0000:3b:00.0/information", "Model: \t GPU\nDevice Minor: \t 3\n");
    write("driver/nvidia/gpus/0000:5e:00.0/information", "Model: \t GPU\nDevice Minor: \t 1\n");
    write("driver/nvidia/gpus/0000:af:00.0/information", "Model: \t GPU\nDevice Minor: \t 7\n");
    write("driver/nvidia-caps/mig-minors",
          "config 1\nmonitor 2\ngpu1/gi1/access 12\ngpu1/gi2/access 13\ngpu3/gi1/access 30\n");
  }
  ~Machine() { fs::remove_all(folder_); }
  std::string dev() const { return folder_ + "/dev"; }
  std::string driver() const { return folder_ + "/driver"; }
  std::vector<std::string> nodesOf(const Devices& devices) const {
    auto nodes = walls::nodesOf(devices, driver(), dev());
    std::sort(nodes.begin(), nodes.end());
    return nodes;
  }

 private:
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(folder_ + "/" + path).parent_path());
    std::ofstream(folder_ + "/" + path) << text;
    fs::permissions(folder_ + "/" + path, fs::perms(0666));
  }
  std::string folder_;
};

// What the body says, of a child: empty if all is well.
std::string inChild(const std::function<std::string()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::string said;
    try {
      said = body();
    } catch (const std::exception& error) {
      said = error.what();
    }
    _exit(::write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  char text[512] = "";
  const ssize_t bytes = read(ends[0], text, sizeof text);
  close(ends[0]);
  int status = 1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  return std::string(text, static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
}

std::set<std::string> contents(const std::string& folder) {
  std::set<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_symlink() || !entry.is_directory()) found.insert(entry.path().lexically_relative(folder));
  return found;
}

// Behind the wall, in the child.
std::string tryAll(const std::string& dev) {
  const std::set<std::string> wanted{"null",
                                     "zero",
                                     "full",
                                     "random",
                                     "urandom",
                                     "nvidiactl",
                                     "nvidia-uvm",
                                     "nvidia3",
                                     "fd",
                                     "stdin",
                                     "stdout",
                                     "stderr",
                                     "nvidia-caps/nvidia-cap30"};
  std::string said;
  if (contents(dev) != wanted)
    for (const std::string& one : contents(dev)) said += one + " ";
  for (const char* node : {"nvidia1", "mem", "kmsg", "fuse", "shm/of-another", "infiniband/uverbs0"})
    if (open((dev + "/" + node).c_str(), O_RDONLY) >= 0) said += std::string("opened ") + node + " ";
  std::string is;
  std::ifstream(dev + "/nvidia3") >> is;
  if (is != "nvidia3") said += "nvidia3 is '" + is + "' ";
  if (open((dev + "/nvidia3").c_str(), O_RDWR) < 0) said += "nvidia3 cannot be used ";
  if (open((dev + "/new").c_str(), O_RDWR | O_CREAT, 0600) >= 0) said += "added a file ";
  if (unlink((dev + "/null").c_str()) == 0) said += "removed one ";
  if (mkdir((dev + "/shm").c_str(), 0700) == 0) said += "made a folder ";
  char here[256] = "";
  if (getcwd(here, sizeof here) == nullptr || std::string(here) != "/") said += "works elsewhere ";
  return said;
}

// Whether this machine lets the user make a namespace; says so where it does not.
bool possible(uid_t user = 0) {
  const std::string why = walls::whyNoOwnDevices(user);
  if (!why.empty()) std::printf("skipped, for user %u: %s\n", user, why.c_str());
  return why.empty();
}

std::string tryAs(uid_t user, const Machine& machine) {
  return inChild([&]() -> std::string {
    if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) return "cannot become another user";
    const auto nodes = machine.nodesOf({{"0000:3B:00.0"}, false});
    if (chdir("/") != 0) return "chdir";
    walls::leaveMountNamespace();
    walls::keepNodes(machine.dev(), nodes);
    return tryAll(machine.dev());
  });
}

}  // namespace

TEST_CASE("what a worker is to have of /dev travels as one word") {
  for (const Devices& devices : {Devices{}, Devices{{}, true}, Devices{{"0000:3b:00.0"}, false},
                                 Devices{{"0000:3b:00.0", "0000:5e:00.0"}, true}}) {
    const Devices read = Devices::parse(devices.text());
    CHECK(read.gpus == devices.gpus);
    CHECK(read.rdma == devices.rdma);
  }
  CHECK(Devices{}.text() == "none");
  CHECK(Devices{{"0000:3b:00.0"}, true}.text() == "0000:3b:00.0,rdma");
}

TEST_CASE("a worker's nodes are those of its own GPUs, by the driver's numbers") {
  const Machine machine;
  const std::vector<std::string> always{"full", "null", "random", "urandom", "zero"};
  CHECK(machine.nodesOf({}) == always);
  CHECK(machine.nodesOf({{"0000:5E:00.0"}, false}) ==
        std::vector<std::string>{"full", "null", "nvidia-caps/nvidia-cap12", "nvidia-uvm", "nvidia1",
                                 "nvidiactl", "random", "urandom", "zero"});
  const auto both = machine.nodesOf({{"0000:3b:00.0", "0000:5e:00.0"}, true});
  for (const char* node : {"nvidia1", "nvidia3", "infiniband/uverbs0", "infiniband/rdma_cm"})
    CHECK(std::count(both.begin(), both.end(), node) == 1);
  CHECK(std::count(both.begin(), both.end(), "nvidia-modeset") == 0);
  // Two partitions of one GPU.
  const auto one = machine.nodesOf({{"0000:3b:00.0", "0000:3b:00.0"}, false});
  CHECK(std::count(one.begin(), one.end(), "nvidia3") == 1);
}

TEST_CASE("a GPU of which no node is known has none") {
  const Machine machine;
  CHECK(walls::nodeOf("0000:3B:00.0", machine.driver(), machine.dev()) == "nvidia3");
  for (const char* gpu : {"0000:77:00.0", "0000:af:00.0", "", "../gpus/0000:3b:00.0"})
    CHECK(walls::nodeOf(gpu, machine.driver(), machine.dev()).empty());
  CHECK(machine.nodesOf({{"0000:af:00.0", "0000:3b:00.0"}, false}) ==
        machine.nodesOf({{"0000:3b:00.0"}, false}));
}

TEST_CASE("in a /dev of its own there is nothing else, and nothing can be added") {
  const Machine machine;
  const auto before = contents(machine.dev());
  if (possible()) CHECK(tryAs(0, machine) == "");
  // An ordinary user has the rights for that in a user namespace alone.
  if (geteuid() == 0 && possible(kOrdinary)) CHECK(tryAs(kOrdinary, machine) == "");
  CHECK(contents(machine.dev()) == before);  // the machine's is as it was
}

TEST_CASE("to ask whether there can be one changes nothing") {
  struct stat before{}, after{};
  REQUIRE(stat("/dev", &before) == 0);
  walls::whyNoOwnDevices();
  REQUIRE(stat("/dev", &after) == 0);
  CHECK(before.st_dev == after.st_dev);
  CHECK(before.st_ino == after.st_ino);
}

TEST_CASE("with the machine's own /dev: devices work, and the others are gone") {
  if (!possible()) return;
  CHECK(inChild([]() -> std::string {
          walls::keepDevices({});
          std::string said;
          char byte = 1;
          const int random = open("/dev/urandom", O_RDONLY), nothing = open("/dev/null", O_WRONLY);
          if (random < 0 || read(random, &byte, 1) != 1) said += "no /dev/urandom ";
          if (nothing < 0 || write(nothing, &byte, 1) != 1) said += "no /dev/null ";
          for (const char* path : {"/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/shm", "/dev/pts", "/dev/ptmx"})
            if (access(path, F_OK) == 0) said += std::string(path) + " is there ";
          return said;
        }) == "");
}
